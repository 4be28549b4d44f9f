#include "crossdock/error.hpp"
#include "router/backend.hpp"

// Builds without CUDA.

namespace crossdock::router {
namespace {

[[noreturn]] void refuse_device() {
  throw Error(ErrorCode::kUnsupported, "this build has no CUDA, and the tensors are on a GPU");
}

}  // namespace

std::unique_ptr<Backend> make_device_backend(const RouterConfig& /*config*/, Device /*device*/,
                                             std::optional<int64_t> /*shared_memory*/) {
  refuse_device();
}

void read_device(const ConstTensorView& /*tensor*/, std::span<std::byte> /*to*/,
                 Stream /*stream*/) {
  refuse_device();
}

void sum_batches_on_device(const SumBatchesArgs& /*args*/, Stream /*stream*/) {
  refuse_device();
}

void update_bias_on_device(const TensorView& /*bias*/, const RouterStatistics& /*statistics*/,
                           const BiasUpdate& /*update*/, Stream /*stream*/) {
  refuse_device();
}

}  // namespace crossdock::router
