#include <algorithm>

#include "comm/cuda/peer_signals.cuh"
#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMostBlocks = 4096;

__device__ float rounded(double value) {
  return static_cast<float>(value);
}
template <typename Weight>
__device__ float rounded(Weight value) {
  return to_float(value);
}

// Calls use(slot, expert) for the set bits of a token, one lane per bit; returns their number. A
// warp reads 32 experts at a time.
template <typename Use>
__device__ int32_t for_set_bits(const uint8_t* token_map, int32_t E, const Use& use) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  int32_t num_set = 0;
  for (int32_t first = 0; first < E; first += 32) {
    const int32_t expert = first + lane;
    const bool is_set = expert < E && token_map[expert] != 0;
    const uint32_t set = __ballot_sync(~0u, is_set);
    if (is_set) use(num_set + __popc(set & ((1u << lane) - 1)), expert);
    num_set += __popc(set);
  }
  return num_set;
}

__device__ int64_t first_token() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

__device__ int64_t token_stride() {
  return static_cast<int64_t>(gridDim.x) * kWarps;
}

__device__ bool is_masked(const bool* mask, int64_t token) {
  return mask != nullptr && mask[token];
}

// A warp takes tokens in turn.
template <typename Weight>
__global__ void __launch_bounds__(kThreads)
    map_slots_kernel(const __grid_constant__ MapSlotsArgs args) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  for (int64_t token = first_token(); token < args.T; token += token_stride()) {
    const auto* weights = static_cast<const Weight*>(args.weights) + token * args.E;
    int32_t* ids = args.expert_ids + token * args.K;
    float* slot_weights = args.slot_weights + token * args.K;
    int32_t num_set = 0;
    if (!is_masked(args.mask, token)) {
      num_set = for_set_bits(args.map + token * args.E, args.E, [&](int32_t slot, int32_t expert) {
        if (slot >= args.K) return;
        ids[slot] = expert;
        slot_weights[slot] = rounded(weights[expert]);
      });
    }
    for (int32_t slot = num_set + lane; slot < args.K; slot += 32) {
      ids[slot] = -1;
      slot_weights[slot] = 0.0f;
    }
    if (num_set <= args.K) continue;
    __syncwarp();  // ids[0] has been written
    if (lane != 0) continue;
    ids[0] = num_set;
    const auto route = static_cast<unsigned long long>(token * args.K);
    atomicMin(reinterpret_cast<unsigned long long*>(args.bad_route),
              route << 8 | static_cast<uint32_t>(FaultCode::kTooManyRoutes));
  }
}

__global__ void __launch_bounds__(kThreads)
    most_bits_kernel(const uint8_t* map, const bool* mask, int64_t T, int32_t E, int32_t* most) {
  int32_t most_here = 0;
  for (int64_t token = first_token(); token < T; token += token_stride()) {
    if (is_masked(mask, token)) continue;
    most_here = max(most_here, for_set_bits(map + token * E, E, [](int32_t, int32_t) {}));
  }
  if (threadIdx.x % 32 == 0 && most_here > 0) atomicMax(most, most_here);
}

template <typename Weight>
__global__ void __launch_bounds__(kThreads)
    round_weights_kernel(const Weight* from, int64_t count, float* to) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    to[i] = rounded(from[i]);
  }
}

unsigned num_blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>(
      std::clamp<int64_t>((count + per_block - 1) / per_block, 1, kMostBlocks));
}

// Calls use(Weight{}) with the type of the weights. REQUIRES: is_summable(dtype).
template <typename Use>
void with_weight(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kF64:
      return use(double{});
    case DType::kBF16:
      return use(BF16{});
    case DType::kF16:
      return use(F16{});
    default:
      return use(float{});
  }
}

}  // namespace

void load_route_slots() {
  load_kernels(map_slots_kernel<double>, map_slots_kernel<float>, map_slots_kernel<BF16>,
               map_slots_kernel<F16>, most_bits_kernel, round_weights_kernel<double>,
               round_weights_kernel<float>, round_weights_kernel<BF16>, round_weights_kernel<F16>);
}

void launch_map_slots(const MapSlotsArgs& args, cudaStream_t stream) {
  if (args.T == 0) return;
  with_weight(args.weight_dtype, [&]<typename Weight>(Weight /*type*/) {
    map_slots_kernel<Weight><<<num_blocks(args.T, kWarps), kThreads, 0, stream>>>(args);
  });
  CROSSDOCK_CUDA(cudaGetLastError());
}

void launch_most_bits(const uint8_t* map, const bool* mask, int64_t T, int32_t E, int32_t* most,
                      cudaStream_t stream) {
  CROSSDOCK_CUDA(cudaMemsetAsync(most, 0, sizeof(*most), stream));
  if (T == 0) return;
  most_bits_kernel<<<num_blocks(T, kWarps), kThreads, 0, stream>>>(map, mask, T, E, most);
  CROSSDOCK_CUDA(cudaGetLastError());
}

void launch_round_weights(const void* from, DType dtype, int64_t count, float* to,
                          cudaStream_t stream) {
  if (count == 0) return;
  with_weight(dtype, [&]<typename Weight>(Weight /*type*/) {
    round_weights_kernel<<<num_blocks(count, kThreads), kThreads, 0, stream>>>(
        static_cast<const Weight*>(from), count, to);
  });
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::cuda
