#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/row_vector.cuh"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/cuda/kernels/zero_rows.cuh"

namespace crossdock::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 4;

__device__ float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(~0u, value, offset);
  }
  return value;
}

// One token and up to kBatch of its slots: reads grad_out and y, writes grad_rows, sums products.
// If a peer has not arrived, every slot is treated as unused. kFound: of y and grad_rows
// (PeerPointers).
template <typename Element, int kCount, int kBatch, bool kFound>
__device__ void gather_slots(const GatherSumBackwardArgs& args, int64_t token, int first_slot) {
  using Vector = RowVector<Element, kCount>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row_vectors = args.D / kCount;
  const auto* grad_out = reinterpret_cast<const Vector*>(args.grad_out) + token * row_vectors;
  const Vector* y[kBatch];
  Vector* grad_rows[kBatch];
  float weights[kBatch];
  float sums[kBatch] = {};
  const bool has_peers = !is_poisoned(args.signals);
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    y[i] = nullptr;
    if (first_slot + i >= args.K) continue;
    const int64_t route = token * args.K + first_slot + i;
    const RouteTarget target = args.targets[route];
    if (target.rank < 0 || !has_peers) continue;
    y[i] =
        reinterpret_cast<const Vector*>(args.y.of<kFound>(target.rank)) + target.row * row_vectors;
    grad_rows[i] = reinterpret_cast<Vector*>(args.grad_rows.of<kFound>(target.rank)) +
                   target.row * row_vectors;
    weights[i] = args.weights[route];
  }
  constexpr int kUnroll = 8 / kBatch;  // 8 rows' loads in flight
  for (int64_t first = lane; first < row_vectors; first += 32 * kUnroll) {
    Vector gradients[kUnroll];
    Vector values[kBatch][kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = first + u * 32;
      if (at >= row_vectors) continue;
      gradients[u] = grad_out[at];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (y[i] != nullptr) values[i][u] = load_once(y[i] + at);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (y[i] == nullptr) continue;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = first + u * 32;
        if (at >= row_vectors) continue;
        Vector result;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const float element = widen(gradients[u].elements[j]);
          result.elements[j] = narrow<Element>(weights[i] * element);
          sums[i] = __fmaf_rn(widen(values[i][u].elements[j]), element, sums[i]);
        }
        store_once(grad_rows[i] + at, result);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const float sum = warp_sum(sums[i]);
    if (lane == 0 && first_slot + i < args.K) {
      args.grad_weights[token * args.K + first_slot + i] = y[i] != nullptr ? sum : 0.0f;
    }
  }
}

// A warp takes tokens in turn.
template <typename Element, int kCount, int kBatch, bool kFound>
__global__ void __launch_bounds__(kWarps * 32, 2)
    gather_sum_backward_kernel(const __grid_constant__ GatherSumBackwardArgs args) {
  wait_for_previous_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (int64_t token = first; token < args.T; token += static_cast<int64_t>(gridDim.x) * kWarps) {
    for (int slot = 0; slot < args.K; slot += kBatch) {
      gather_slots<Element, kCount, kBatch, kFound>(args, token, slot);
    }
  }
  if (last_block(args.signals) && !peer_barrier(args.signals, Operation::kCombineBackward)) {
    const int own = args.signals.P == 0 ? 0 : args.signals.rank;
    zero_own_rows(args.targets, args.T * args.K, own, args.grad_rows.known[own],
                  args.D * static_cast<int64_t>(sizeof(Element)));
  }
}

template <typename Element, int kCount, bool kFound>
void launch_kernel(const GatherSumBackwardArgs& args, int sms, cudaStream_t stream) {
  const int64_t wanted = std::max<int64_t>((args.T + kWarps - 1) / kWarps, 1);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted, int64_t{sms} * kBlocksPerSm));
  auto* kernel = args.K <= 4 ? gather_sum_backward_kernel<Element, kCount, 4, kFound>
                             : gather_sum_backward_kernel<Element, kCount, 8, kFound>;
  launch_early(kernel, blocks, kWarps * 32, stream, args);
}

template <typename Element, int kCount>
void launch(const GatherSumBackwardArgs& args, int sms, cudaStream_t stream) {
  if (args.y.found != nullptr) {
    launch_kernel<Element, kCount, true>(args, sms, stream);
  } else {
    launch_kernel<Element, kCount, false>(args, sms, stream);
  }
}

template <typename Element>
void launch_for_width(const GatherSumBackwardArgs& args, int sms, cudaStream_t stream) {
  uint64_t bits =
      reinterpret_cast<uint64_t>(args.grad_out) | static_cast<uint64_t>(args.D) * sizeof(Element);
  for (int p = 0; p < std::max(args.signals.P, 1); ++p) {
    bits |= reinterpret_cast<uint64_t>(args.y.known[p]) |
            reinterpret_cast<uint64_t>(args.grad_rows.known[p]);
  }
  if (bits % 16 == 0) {
    launch<Element, kWide<Element>>(args, sms, stream);
  } else {
    launch<Element, 1>(args, sms, stream);
  }
}

template <typename Element, bool kFound>
void load_kind() {
  load_kernels(gather_sum_backward_kernel<Element, kWide<Element>, 4, kFound>,
               gather_sum_backward_kernel<Element, kWide<Element>, 8, kFound>,
               gather_sum_backward_kernel<Element, 1, 4, kFound>,
               gather_sum_backward_kernel<Element, 1, 8, kFound>);
}

template <typename Element>
void load_for() {
  load_kind<Element, false>();
  load_kind<Element, true>();
}

}  // namespace

void load_gather_sum_backward() {
  load_for<float>();
  load_for<BF16>();
  load_for<F16>();
}

void launch_gather_sum_backward(const GatherSumBackwardArgs& args, int sms, cudaStream_t stream) {
  if (sms == 0) sms = num_sms(current_device());
  with_element(args.dtype,
               [&]<typename Element>(Element) { launch_for_width<Element>(args, sms, stream); });
}

}  // namespace crossdock::cuda
