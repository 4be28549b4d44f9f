#include <algorithm>
#include <cstddef>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/tensor_memory.hpp"
#include "ops/gemm.hpp"
#include "router/cuda/kernels.hpp"
#include "router/cuda/split_product.cuh"
#include "router/cuda/token_matrix.cuh"

namespace crossdock::router {
namespace {

constexpr int64_t kWantedGateBlocks = 132;  // the SMs of an H200
constexpr int64_t kSliceMultiple = 64;      // tokens that a block multiplies at a time, at most
constexpr int64_t kMostBiasSlices = 128;
constexpr int64_t kLeastBiasTokens = 64;
constexpr int kSumThreads = 256;

// A block's part of the product: a tile of grad_gate and a slice of the tokens.
struct GatePart {
  int64_t expert;
  int64_t column;
  int64_t begin;  // tokens
  int64_t end;

  template <typename Tile>
  static __device__ GatePart of(const GradGateArgs& args) {
    const int64_t across = (args.D + Tile::kColumns - 1) / Tile::kColumns;
    const int64_t begin = blockIdx.y * args.slices.num_tokens;
    return {blockIdx.x / across * Tile::kRows, blockIdx.x % across * Tile::kColumns, begin,
            min(begin + args.slices.num_tokens, args.T)};
  }
};

__device__ void store_grad_gate(const GradGateArgs& args, int64_t e, int64_t d, float value) {
  if (e >= args.E || d >= args.D) return;
  const int64_t i = e * args.D + d;
  if (args.slices.count > 1) {
    args.slice_sums[blockIdx.y * args.E * args.D + i] = value;
  } else {
    args.grad_gate[i] = args.accumulates ? args.grad_gate[i] + value : value;
  }
}

// A block computes one tile of one slice.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    fma_grad_gate_kernel(const __grid_constant__ GradGateArgs args, DeviceMatrix grad_logits,
                         DeviceMatrix x) {
  const GatePart part = GatePart::of<Tile>(args);
  const OperandByColumns<DeviceMatrix> a{grad_logits, args.E};
  const OperandByColumns<TokenMatrix> b{{x, args.jitter, args.sequences}, args.D};
  fma_product<Tile>(a, b, {part.expert, part.column, part.begin, part.end},
                    [&](int64_t e, int64_t d, const float(&values)[4]) {
#pragma unroll
                      for (int j = 0; j < 4; ++j) store_grad_gate(args, e, d + j, values[j]);
                    });
}

// A block computes one tile of one slice.
template <typename Tile, bool kCopiesVectors>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    split_grad_gate_kernel(const __grid_constant__ GradGateArgs args) {
  extern __shared__ __align__(16) std::byte grad_gate_memory[];
  const GatePart part = GatePart::of<Tile>(args);
  const SplitOperands operands{
      args.grad_logits, static_cast<const BF16*>(args.x), args.sequences, args.E, args.D, args.T};
  SplitProduct<Tile, true, kCopiesVectors> product(
      operands, {part.expert, part.column, part.begin, part.end}, grad_gate_memory);
  product.run([&](int64_t e, int64_t d, float first, float second) {
    store_grad_gate(args, e, d, first);
    store_grad_gate(args, e, d + 1, second);
  });
}

// A thread adds up the slices of kCount neighbours, which it reads in advance.
template <typename Sum, int kCount>
__global__ void __launch_bounds__(kSumThreads)
    sum_slices_kernel(const Sum* slice_sums, int64_t num_slices, int64_t size, bool accumulates,
                      float* out) {
  struct alignas(kCount * sizeof(Sum)) Sums {
    Sum values[kCount];
  };
  struct alignas(kCount * sizeof(float)) Floats {
    float values[kCount];
  };
  constexpr int kAhead = 8;
  cuda::wait_for_previous_kernel();
  cuda::allow_next_kernel();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kSumThreads * kCount;
  for (int64_t i = (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) * kCount; i < size;
       i += stride) {
    Sums total{};
    for (int64_t first = 0; first < num_slices; first += kAhead) {
      Sums ahead[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (first + n >= num_slices) break;
        ahead[n] = *reinterpret_cast<const Sums*>(slice_sums + (first + n) * size + i);
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (first + n >= num_slices) break;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          total.values[j] =
              first + n == 0 ? ahead[n].values[j] : total.values[j] + ahead[n].values[j];
        }
      }
    }
    auto* const to = reinterpret_cast<Floats*>(out + i);
    Floats values = accumulates ? *to : Floats{};
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const auto value = static_cast<float>(total.values[j]);
      values.values[j] = accumulates ? values.values[j] + value : value;
    }
    *to = values;
  }
}

// A block takes one slice of the tokens, a thread one expert at a time.
__global__ void __launch_bounds__(kSumThreads)
    bias_slices_kernel(const __grid_constant__ GradBiasArgs args) {
  const int64_t begin = blockIdx.x * args.slices.num_tokens;
  const int64_t end = min(begin + args.slices.num_tokens, args.T);
  for (int64_t e = threadIdx.x; e < args.E; e += kSumThreads) {
    double sum = 0.0;
#pragma unroll 8
    for (int64_t t = begin; t < end; ++t) {
      sum += static_cast<double>(args.grad_logits[t * args.E + e]);
    }
    args.slice_sums[blockIdx.x * args.E + e] = sum;
  }
}

template <int kCount, typename Sum>
void launch_sum_slices(const Sum* slice_sums, int64_t num_slices, int64_t size, bool accumulates,
                       float* out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      (size + kSumThreads * kCount - 1) / (kSumThreads * kCount), int64_t{1} << 20));
  cuda::launch_early(sum_slices_kernel<Sum, kCount>, blocks, kSumThreads, stream, slice_sums,
                     num_slices, size, accumulates, out);
}

template <typename Tile>
dim3 gate_grid(const GradGateArgs& args) {
  const int64_t tiles =
      (args.E + Tile::kRows - 1) / Tile::kRows * ((args.D + Tile::kColumns - 1) / Tile::kColumns);
  return {static_cast<unsigned>(tiles), static_cast<unsigned>(args.slices.count)};
}

template <typename Tile>
void launch_fma_gate(const GradGateArgs& args, cudaStream_t stream) {
  fma_grad_gate_kernel<Tile><<<gate_grid<Tile>(args), Tile::kThreads, 0, stream>>>(
      args, device_matrix(args.grad_logits, DType::kF32, args.E),
      device_matrix(args.x, args.x_dtype, args.D));
}

template <typename Tile, bool kCopiesVectors>
void launch_split_gate(const GradGateArgs& args, cudaStream_t stream) {
  split_grad_gate_kernel<Tile, kCopiesVectors>
      <<<gate_grid<Tile>(args), Tile::kThreads, Tile::kSharedBytes, stream>>>(args);
}

void launch_split_gate(const GradGateArgs& args, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(args.grad_logits) |
                    reinterpret_cast<uintptr_t>(args.x) | static_cast<uintptr_t>(args.E * 4) |
                    static_cast<uintptr_t>(args.D * 2);
  if (bits % 16 != 0) {
    launch_split_gate<SplitTile<32>, false>(args, stream);
  } else if (args.E <= 32) {
    launch_split_gate<SplitTile<32>, true>(args, stream);
  } else if (args.E <= 64) {
    launch_split_gate<SplitTile<64>, true>(args, stream);
  } else {
    launch_split_gate<SplitTile<128>, true>(args, stream);
  }
}

template <typename Tile, bool kCopiesVectors>
void load_split_gate() {
  cuda::load_kernels(split_grad_gate_kernel<Tile, kCopiesVectors>);
  CROSSDOCK_CUDA(cudaFuncSetAttribute(split_grad_gate_kernel<Tile, kCopiesVectors>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      Tile::kSharedBytes));
}

}  // namespace

TokenSlices gate_slices(int64_t T, int64_t E, int64_t D) {
  const int64_t tiles = (E + 127) / 128 * ((D + 127) / 128);
  const int64_t wanted = std::max<int64_t>(kWantedGateBlocks / tiles, 1);
  const int64_t num_tokens =
      std::max(round_up((T + wanted - 1) / wanted, kSliceMultiple), ops::kGemmBlockK);
  return {.count = std::max<int64_t>((T + num_tokens - 1) / num_tokens, 1),
          .num_tokens = num_tokens};
}

TokenSlices bias_slices(int64_t T) {
  const int64_t num_tokens =
      std::max((T + kMostBiasSlices - 1) / kMostBiasSlices, kLeastBiasTokens);
  return {.count = (T + num_tokens - 1) / num_tokens, .num_tokens = num_tokens};
}

void load_grad_gate() {
  cuda::load_kernels(fma_grad_gate_kernel<WideFmaTile>, fma_grad_gate_kernel<SmallFmaTile>,
                     sum_slices_kernel<float, 1>, sum_slices_kernel<float, 4>,
                     sum_slices_kernel<double, 1>, bias_slices_kernel);
  load_split_gate<SplitTile<32>, false>();
  load_split_gate<SplitTile<32>, true>();
  load_split_gate<SplitTile<64>, true>();
  load_split_gate<SplitTile<128>, true>();
}

void launch_grad_gate(const GradGateArgs& args, cudaStream_t stream) {
  if (args.x_dtype == DType::kBF16 && args.jitter.size == 0.0f) {
    launch_split_gate(args, stream);
  } else if (args.E > 32) {
    launch_fma_gate<WideFmaTile>(args, stream);
  } else {
    launch_fma_gate<SmallFmaTile>(args, stream);
  }
  CROSSDOCK_CUDA(cudaGetLastError());
  launch_sum_gate(args, stream);
}

void launch_sum_gate(const GradGateArgs& args, cudaStream_t stream) {
  if (args.slices.count == 1) return;
  const int64_t size = args.E * args.D;
  if (size % 4 == 0 && reinterpret_cast<uintptr_t>(args.grad_gate) % 16 == 0) {
    launch_sum_slices<4>(args.slice_sums, args.slices.count, size, args.accumulates, args.grad_gate,
                         stream);
  } else {
    launch_sum_slices<1>(args.slice_sums, args.slices.count, size, args.accumulates, args.grad_gate,
                         stream);
  }
}

void launch_grad_bias(const GradBiasArgs& args, cudaStream_t stream) {
  if (args.slices.count > 0) {
    bias_slices_kernel<<<static_cast<unsigned>(args.slices.count), kSumThreads, 0, stream>>>(args);
    CROSSDOCK_CUDA(cudaGetLastError());
  }
  launch_sum_slices<1>(args.slice_sums, args.slices.count, args.E, args.accumulates, args.grad_bias,
                       stream);
}

}  // namespace crossdock::router
