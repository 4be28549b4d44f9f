#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "ops/gemm.hpp"
#include "router/cuda/hopper/gate_products.hpp"
#include "router/cuda/kernels.hpp"
#include "router/cuda/split_product.cuh"
#include "router/cuda/token_matrix.cuh"

// Products of bf16 or fp16 rows on tensor cores. Each product of two elements is exact. k runs in
// blocks of kGemmBlockK as in ops::gemm; the tensor cores sum within a block, 16 products at a time
// in ascending order, and the blocks' sums are added in fp32 in ascending order. So an element's
// bits depend on its row and column alone, whatever the tile.

namespace crossdock::router {

/// The tile of the result that a block of threads computes, and how many parts of the operands are
/// in shared memory at a time.
template <int kTileRows, int kTileColumns, int kWarpsDown, int kWarpsAcross, int kNumStages,
          int kNumBlocks>
struct MmaTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kAcross = kWarpsAcross;
  static constexpr int kRowTiles = kRows / kWarpsDown / 16;          // of a warp
  static constexpr int kColumnPairs = kColumns / kWarpsAcross / 16;  // of a warp, two tiles of 8
  static constexpr int kStages = kNumStages;
  static constexpr int kBlocksPerSm = kNumBlocks;  // as registers and shared memory allow
  static constexpr int kDepth = 64;                // k of a stage
  static constexpr int kPitch = kDepth + 8;        // 8 rows of 16 bytes are in different banks
  static constexpr int kStageElements = (kRows + kColumns) * kPitch;
  static constexpr int kSharedBytes = kStages * kStageElements * 2;
  static_assert(kRowTiles >= 1 && kColumnPairs >= 1 && ops::kGemmBlockK % kDepth == 0);
};

/// c [M, N] = a b^T with a [M, K] and b [N, K].
template <typename Element>
struct MmaOperands {
  const Element* a;
  const Element* b;
  int64_t M;
  int64_t N;
  int64_t K;
};

/// One tile of a product. kCopiesVectors: both operands and their rows are aligned to 16 bytes.
template <typename Element, typename Tile, bool kCopiesVectors>
class MmaProduct {
 public:
  /// The tile begins at `row` and `column`. `stages` are Tile::kSharedBytes of shared memory,
  /// aligned to 16 bytes.
  __device__ MmaProduct(const MmaOperands<Element>& operands, int64_t row, int64_t column,
                        Element* stages)
      : operands_(operands), row_(row), column_(column), stages_(stages) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    warp_row_ = warp / Tile::kAcross * Tile::kRowTiles * 16;
    warp_column_ = warp % Tile::kAcross * Tile::kColumnPairs * 16;
  }

  /// All threads of the block must call it. Calls store(i, j, first, second) with the results
  /// (i, j) and (i, j + 1), also outside the product.
  template <typename Store>
  __device__ void run(const Store& store) {
    const int num_steps = static_cast<int>((operands_.K + Tile::kDepth - 1) / Tile::kDepth);
    for (int step = 0; step < Tile::kStages - 1; ++step) fill(step, num_steps);
    for (int step = 0; step < num_steps; ++step) {
      wait_for_copies<Tile::kStages - 2>();
      __syncthreads();  // all warps see the stage, and all have left the one before it
      fill(step + Tile::kStages - 1, num_steps);
      add(stage(step));
      constexpr int kSteps = ops::kGemmBlockK / Tile::kDepth;
      if (step % kSteps == kSteps - 1 || step == num_steps - 1) own_.end_block(step < kSteps);
    }
    wait_for_copies<0>();
    own_.store_totals(row_ + warp_row_, column_ + warp_column_, store);
  }

 private:
  __device__ Element* stage(int step) const {
    return stages_ + step % Tile::kStages * Tile::kStageElements;
  }

  // Starts reading a stage: kDepth columns of the tile's rows of a, then of b.
  __device__ void fill(int step, int num_steps) const {
    if (step < num_steps) {
      const int64_t K = operands_.K;
      const int64_t k = int64_t{step} * Tile::kDepth;
      Element* to = stage(step);
      copy_part<Tile::kRows, Tile::kDepth, Tile::kPitch, Tile::kThreads, kCopiesVectors>(
          operands_.a, {row_, operands_.M, k, K, K}, to);
      copy_part<Tile::kColumns, Tile::kDepth, Tile::kPitch, Tile::kThreads, kCopiesVectors>(
          operands_.b, {column_, operands_.N, k, K, K}, to + Tile::kRows * Tile::kPitch);
    }
    commit_copies();
  }

  __device__ void add(const Element* from) {
    const Element* from_b = from + Tile::kRows * Tile::kPitch;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += 16) {
      uint32_t a[Tile::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < Tile::kRowTiles; ++i) {
        const int row = warp_row_ + i * 16 + lane % 16;
        load_fragments(from + row * Tile::kPitch + k + lane / 16 * 8, a[i]);
      }
#pragma unroll
      for (int j = 0; j < Tile::kColumnPairs; ++j) {
        uint32_t b[4];
        const int row = warp_column_ + j * 16 + lane / 16 * 8 + lane % 8;
        load_fragments(from_b + row * Tile::kPitch + k + lane / 8 % 2 * 8, b);
#pragma unroll
        for (int i = 0; i < Tile::kRowTiles; ++i) {
          multiply_add<Element>(a[i], b[0], b[1], own_.sums[i][2 * j]);
          multiply_add<Element>(a[i], b[2], b[3], own_.sums[i][2 * j + 1]);
        }
      }
    }
  }

  MmaOperands<Element> operands_;
  int64_t row_;
  int64_t column_;
  Element* stages_;
  int warp_row_;
  int warp_column_;
  MmaSums<Tile::kRowTiles, 2 * Tile::kColumnPairs> own_;
};

}  // namespace crossdock::router

namespace crossdock::router {
namespace {

// Tiles of tensor-core products, in tokens x experts. All give the same bits.
using LargeTile = MmaTile<128, 128, 2, 4, 4, 1>;
using MiddleTile = MmaTile<64, 128, 2, 4, 4, 2>;
using SquareTile = MmaTile<64, 64, 2, 2, 4, 3>;
using SmallTile = MmaTile<32, 32, 2, 2, 6, 4>;

// The first token and expert of a block's tile. Blocks of the same tokens are neighbours, so that x
// is read from memory once.
struct TilePlace {
  int64_t token;
  int64_t expert;

  template <typename Tile>
  static __device__ TilePlace of(int64_t E) {
    const int64_t across = (E + Tile::kColumns - 1) / Tile::kColumns;
    return {blockIdx.x / across * Tile::kRows, blockIdx.x % across * Tile::kColumns};
  }
};

__device__ void store_logit(const LogitsArgs& args, int64_t token, int64_t e, float value) {
  if (token < args.T && e < args.E) args.logits[token * args.E + e] = value + bias_of(args, e);
}

// A block computes one tile.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    fma_logits_kernel(const __grid_constant__ LogitsArgs args, DeviceMatrix x, DeviceMatrix gate) {
  const TilePlace place = TilePlace::of<Tile>(args.E);
  const OperandByRows<TokenMatrix> a{{x, args.jitter, nullptr}, args.T};
  const OperandByRows<DeviceMatrix> b{gate, args.E};
  fma_product<Tile>(a, b, {place.token, place.expert, 0, args.D},
                    [&](int64_t token, int64_t e, const float(&values)[4]) {
#pragma unroll
                      for (int j = 0; j < 4; ++j) store_logit(args, token, e + j, values[j]);
                    });
}

// A block computes one tile.
template <typename Element, typename Tile, bool kCopiesVectors>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    mma_logits_kernel(const __grid_constant__ LogitsArgs args) {
  extern __shared__ __align__(16) std::byte logits_memory[];
  const TilePlace place = TilePlace::of<Tile>(args.E);
  const MmaOperands<Element> operands{static_cast<const Element*>(args.x),
                                      static_cast<const Element*>(args.gate), args.T, args.E,
                                      args.D};
  MmaProduct<Element, Tile, kCopiesVectors> product(operands, place.token, place.expert,
                                                    reinterpret_cast<Element*>(logits_memory));
  product.run([&](int64_t token, int64_t e, float first, float second) {
    store_logit(args, token, e, first);
    store_logit(args, token, e + 1, second);
  });
}

template <typename Tile>
int64_t num_tiles(const LogitsArgs& args) {
  return (args.T + Tile::kRows - 1) / Tile::kRows *
         ((args.E + Tile::kColumns - 1) / Tile::kColumns);
}

template <typename Tile>
void launch_fma(const LogitsArgs& args, cudaStream_t stream) {
  fma_logits_kernel<Tile>
      <<<static_cast<unsigned>(num_tiles<Tile>(args)), Tile::kThreads, 0, stream>>>(
          args, device_matrix(args.x, args.x_dtype, args.D),
          device_matrix(args.gate, args.gate_dtype, args.D));
}

template <typename Element, typename Tile, bool kCopiesVectors>
void launch_mma(const LogitsArgs& args, cudaStream_t stream) {
  mma_logits_kernel<Element, Tile, kCopiesVectors>
      <<<static_cast<unsigned>(num_tiles<Tile>(args)), Tile::kThreads, Tile::kSharedBytes,
         stream>>>(args);
}

// Whether a tile leaves hardly any SM without work.
template <typename Tile>
bool is_worthwhile(const LogitsArgs& args, int64_t shared_memory) {
  const int64_t num_sms = cuda::num_sms(cuda::current_device());
  return shared_memory >= Tile::kSharedBytes && num_tiles<Tile>(args) * 10 >= num_sms * 9;
}

// With the largest tile that keeps the GPU busy and is not mostly empty.
template <typename Element>
void launch_mma(const LogitsArgs& args, int64_t shared_memory, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.gate) |
                    static_cast<uintptr_t>(args.D * 2);
  if (bits % 16 != 0) {
    launch_mma<Element, SmallTile, false>(args, stream);
  } else if (args.E > 64 && is_worthwhile<LargeTile>(args, shared_memory)) {
    launch_mma<Element, LargeTile, true>(args, stream);
  } else if (args.E > 64 && is_worthwhile<MiddleTile>(args, shared_memory)) {
    launch_mma<Element, MiddleTile, true>(args, stream);
  } else if (args.E > 32 && is_worthwhile<SquareTile>(args, shared_memory)) {
    launch_mma<Element, SquareTile, true>(args, stream);
  } else {
    launch_mma<Element, SmallTile, true>(args, stream);
  }
}

template <typename Element, typename Tile, bool kCopiesVectors>
void load_mma() {
  if (cuda::shared_memory_per_block(cuda::current_device()) < Tile::kSharedBytes) return;
  cuda::load_kernels(mma_logits_kernel<Element, Tile, kCopiesVectors>);
  CROSSDOCK_CUDA(cudaFuncSetAttribute(mma_logits_kernel<Element, Tile, kCopiesVectors>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      Tile::kSharedBytes));
}

template <typename Element>
void load_mma() {
  load_mma<Element, LargeTile, true>();
  load_mma<Element, MiddleTile, true>();
  load_mma<Element, SquareTile, true>();
  load_mma<Element, SmallTile, true>();
  load_mma<Element, SmallTile, false>();
}

}  // namespace

void load_logits() {
  cuda::load_kernels(fma_logits_kernel<WideFmaTile>, fma_logits_kernel<SmallFmaTile>);
  load_mma<BF16>();
  load_mma<F16>();
}

void launch_logits(const LogitsArgs& args, const LogitsMeans& means, cudaStream_t stream) {
  const bool is_16_bit = args.x_dtype == args.gate_dtype && args.x_dtype != DType::kF32;
  const bool on_tensor_cores = is_16_bit && args.jitter.size == 0.0f;
  if (args.T > 0 && on_tensor_cores && hopper::takes(args, means)) {
    return hopper::launch_logits(args, means, stream);
  }
  CROSSDOCK_CUDA(cudaMemsetAsync(
      args.counts, 0, static_cast<size_t>(args.num_counts) * sizeof(*args.counts), stream));
  if (args.T == 0) return;
  if (on_tensor_cores) {
    if (args.x_dtype == DType::kBF16) {
      launch_mma<BF16>(args, means.shared_memory, stream);
    } else {
      launch_mma<F16>(args, means.shared_memory, stream);
    }
  } else if (args.E > 32) {
    launch_fma<WideFmaTile>(args, stream);
  } else {
    launch_fma<SmallFmaTile>(args, stream);
  }
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::router
