#include "crossdock/error.hpp"
#include "layer/device_memory.hpp"

// Builds without CUDA.

namespace crossdock {
namespace {

[[noreturn]] void refuse_device() {
  throw Error(ErrorCode::kUnsupported, "this build has no CUDA, and the tensors are on a GPU");
}

}  // namespace

std::unique_ptr<DeviceMemory> make_device_memory(Device /*device*/) {
  refuse_device();
}

Stream stream_of_calls(Group& /*group*/, Stream stream) {
  return stream;
}

bool is_captured(Stream /*stream*/, Device /*device*/) {
  refuse_device();
}

void load_device_shards(Device /*device*/) {
  refuse_device();
}

void shard_routes_on_device(const Routing& /*routing*/, const ShardedRoutes& /*sharded*/,
                            Stream /*stream*/) {
  refuse_device();
}

void sum_over_shards_on_device(const ConstTensorView& /*values*/, const TensorView& /*out*/,
                               Stream /*stream*/) {
  refuse_device();
}

}  // namespace crossdock
