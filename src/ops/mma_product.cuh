#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/gemm.hpp"
#include "ops/mma_tile.cuh"
#include "ops/warp_mma.cuh"

// Products of bf16 or fp16 rows on tensor cores. Each product of two elements is exact. k runs in
// blocks of kGemmBlockK as in ops::gemm; the tensor cores sum within a block, 16 products at a time
// in ascending order, and the blocks' sums are added in fp32 in ascending order. So an element's
// bits depend on its row and column alone, whatever the tile.

namespace crossdock::ops {

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
  static_assert(kRowTiles >= 1 && kColumnPairs >= 1 && kGemmBlockK % kDepth == 0);
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
      constexpr int kSteps = kGemmBlockK / Tile::kDepth;
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

}  // namespace crossdock::ops
