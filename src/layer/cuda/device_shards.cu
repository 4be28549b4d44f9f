#include <algorithm>
#include <limits>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "layer/device_memory.hpp"

namespace crossdock {
namespace {

constexpr int kThreads = 256;

// Blocks whose threads take `count` values in turn.
unsigned num_blocks(int64_t count) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  return static_cast<unsigned>(
      std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

struct ShardRoutesArgs {
  const int32_t* ids;    // [num_slots / etp]
  const float* weights;  // likewise
  int32_t* shard_ids;    // [num_slots]
  float* shard_weights;  // likewise
  int64_t num_slots;
  int32_t etp;
};

// The virtual expert of a shard. An id that is out of range stays so.
__device__ int32_t number_shard(int32_t id, int32_t etp, int64_t shard) {
  constexpr int64_t kLast = std::numeric_limits<int32_t>::max();
  return id < 0 ? id : static_cast<int32_t>(min(int64_t{id} * etp + shard, kLast));
}

// A thread writes slots in turn. Floor: 8 (1 + 1 / etp) bytes per slot.
__global__ void __launch_bounds__(kThreads)
    shard_routes_kernel(const __grid_constant__ ShardRoutesArgs args) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  int64_t slot = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; slot < args.num_slots; slot += stride) {
    const int64_t route = slot / args.etp;
    args.shard_ids[slot] = number_shard(args.ids[route], args.etp, slot - route * args.etp);
    args.shard_weights[slot] = args.weights[route];
  }
}

// A thread sums the shards of routes in turn. Floor: 4 (etp + 1) bytes per route.
__global__ void __launch_bounds__(kThreads)
    sum_over_shards_kernel(const float* values, float* out, int64_t num_routes, int32_t etp) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_routes; i += stride) {
    float sum = 0.0f;
    for (int32_t shard = 0; shard < etp; ++shard) sum += values[i * etp + shard];
    out[i] = sum;
  }
}

}  // namespace

void load_device_shards(Device device) {
  const cuda::CallGuard guard(device.index);
  cuda::load_kernels(shard_routes_kernel, sum_over_shards_kernel);
}

void shard_routes_on_device(const Routing& routing, const ShardedRoutes& sharded, Stream stream) {
  const ConstTensorView& ids = routing.expert_ids;
  CROSSDOCK_ASSERT(ids.dtype == DType::kI32 && routing.weights.dtype == DType::kF32);
  const int64_t num_slots = sharded.expert_ids.view.num_elements();
  if (num_slots == 0) return;
  const ShardRoutesArgs args{.ids = pointer<int32_t>(ids),
                             .weights = pointer<float>(routing.weights),
                             .shard_ids = pointer<int32_t>(sharded.expert_ids.view),
                             .shard_weights = pointer<float>(sharded.weights.view),
                             .num_slots = num_slots,
                             .etp = static_cast<int32_t>(num_slots / ids.num_elements())};
  const cuda::CallGuard guard(ids.device.index);
  shard_routes_kernel<<<num_blocks(num_slots), kThreads, 0, cuda::handle_of(stream)>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

void sum_over_shards_on_device(const ConstTensorView& values, const TensorView& out,
                               Stream stream) {
  CROSSDOCK_ASSERT(values.dtype == DType::kF32 && out.dtype == DType::kF32);
  const int64_t num_routes = out.num_elements();
  if (num_routes == 0) return;
  const auto etp = static_cast<int32_t>(values.num_elements() / num_routes);
  const cuda::CallGuard guard(out.device.index);
  sum_over_shards_kernel<<<num_blocks(num_routes), kThreads, 0, cuda::handle_of(stream)>>>(
      pointer<float>(values), pointer<float>(out), num_routes, etp);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock
