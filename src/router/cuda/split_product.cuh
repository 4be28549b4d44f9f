#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "crossdock/dtype.hpp"
#include "ops/gemm.hpp"
#include "router/cuda/mma_tile.cuh"

// Products of an fp32 and a bf16 matrix on tensor cores, as exact as sums in fp32: an fp32 element
// is the sum of three bf16 numbers, so its product with a bf16 element is the sum of three exact
// products. k runs in blocks of ops::kGemmBlockK, whose sums are added in fp32 in ascending order.

namespace crossdock::router {

/// The tile of the result that a block of 8 warps computes; kTileRows is 32, 64 or 128.
template <int kTileRows>
struct SplitTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = 128;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = kRows <= 64 ? 2 : 1;      // as registers allow
  static constexpr int kAcross = 256 / kRows;                   // warps side by side, 32 rows each
  static constexpr int kColumnPairs = kColumns / kAcross / 16;  // of a warp, two tiles of 8
  static constexpr int kStages = 3;
  static constexpr int kDepth = 32;  // k of a stage
  // Elements from row to row in shared memory, chosen so that lanes read different banks.
  static constexpr int kPitchA = kDepth + 8;
  static constexpr int kPitchTransposedA = kRows + 4;
  static constexpr int kPitchB = kColumns + 8;
  static constexpr int kFloatsA = kRows * kPitchA;  // transposed or not
  static constexpr int kStageBytes = kFloatsA * 4 + kDepth * kPitchB * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kDepth * kPitchTransposedA <= kFloatsA && kFloatsA % 4 == 0 &&
                kStageBytes % 16 == 0);
  static_assert(kColumnPairs >= 1 && ops::kGemmBlockK % kDepth == 0);
};

/// c [M, N] = a b with b [K, N] and a [M, K] or, transposed, [K, M].
struct SplitOperands {
  const float* a;
  const BF16* b;
  const int32_t* kept;  // [K], optional: where it is negative, row k of b counts as zero
  int64_t M;
  int64_t N;
  int64_t K;
};

/// The part of a product that a block of threads computes.
struct SplitPart {
  int64_t row;      // the tile's first
  int64_t column;   // the tile's first
  int64_t begin_k;  // where blocks of ops::kGemmBlockK begin
  int64_t end_k;
};

/// Two fp32 numbers as the sums of three bf16 numbers each, without rounding.
struct SplitPair {
  uint32_t parts[3];  // the largest part last

  __device__ SplitPair(float first, float second) {
#pragma unroll
    for (int part = 2; part >= 0; --part) {
      parts[part] = pack_bf16(first, second);
      first -= to_float(BF16{static_cast<uint16_t>(parts[part])});
      second -= to_float(BF16{static_cast<uint16_t>(parts[part] >> 16)});
    }
  }
};

/// One tile of a product. kIsTransposed: a is.
template <typename Tile, bool kIsTransposed, bool kCopiesVectors>
class SplitProduct {
 public:
  /// `stages` are Tile::kSharedBytes of shared memory, aligned to 16 bytes.
  __device__ SplitProduct(const SplitOperands& operands, const SplitPart& part, std::byte* stages)
      : operands_(operands), part_(part), stages_(stages) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    warp_row_ = warp / Tile::kAcross * 32;
    warp_column_ = warp % Tile::kAcross * Tile::kColumnPairs * 16;
  }

  /// All threads of the block must call it. Calls store(i, j, first, second) with the results
  /// (i, j) and (i, j + 1), also outside the product.
  template <typename Store>
  __device__ void run(const Store& store) {
    const auto num_steps =
        static_cast<int>((part_.end_k - part_.begin_k + Tile::kDepth - 1) / Tile::kDepth);
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
    own_.store_totals(part_.row + warp_row_, part_.column + warp_column_, store);
  }

 private:
  static constexpr int kPitchA = kIsTransposed ? Tile::kPitchTransposedA : Tile::kPitchA;

  __device__ std::byte* stage(int step) const {
    return stages_ + step % Tile::kStages * Tile::kStageBytes;
  }

  __device__ void fill(int step, int num_steps) const {
    if (step < num_steps) {
      constexpr int kRowsA = kIsTransposed ? Tile::kDepth : Tile::kRows;
      constexpr int kColumnsA = kIsTransposed ? Tile::kRows : Tile::kDepth;
      const int64_t k = part_.begin_k + int64_t{step} * Tile::kDepth;
      auto* a = reinterpret_cast<float*>(stage(step));
      const MatrixPart part_a =
          kIsTransposed ? MatrixPart{k, part_.end_k, part_.row, operands_.M, operands_.M}
                        : MatrixPart{part_.row, operands_.M, k, part_.end_k, operands_.K};
      copy_part<kRowsA, kColumnsA, kPitchA, Tile::kThreads, kCopiesVectors>(operands_.a, part_a, a);
      const MatrixPart part_b{k,           part_.end_k, part_.column,
                              operands_.N, operands_.N, operands_.kept};
      copy_part<Tile::kDepth, Tile::kColumns, Tile::kPitchB, Tile::kThreads, kCopiesVectors>(
          operands_.b, part_b, reinterpret_cast<BF16*>(a + Tile::kFloatsA));
    }
    commit_copies();
  }

  // Elements (row, k) and (row, k + 1) of a.
  static __device__ SplitPair read_a(const float* a, int row, int k) {
    if constexpr (kIsTransposed) {
      return {a[k * kPitchA + row], a[(k + 1) * kPitchA + row]};
    } else {
      const float2 pair = *reinterpret_cast<const float2*>(a + row * kPitchA + k);
      return {pair.x, pair.y};
    }
  }

  __device__ void add(const std::byte* from) {
    const auto* a = reinterpret_cast<const float*>(from);
    const auto* b = reinterpret_cast<const BF16*>(a + Tile::kFloatsA);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += 16) {
      uint32_t a_parts[3][2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const SplitPair pair =
              read_a(a, warp_row_ + i * 16 + n % 2 * 8 + lane / 4, k + n / 2 * 8 + lane % 4 * 2);
#pragma unroll
          for (int part = 0; part < 3; ++part) a_parts[part][i][n] = pair.parts[part];
        }
      }
#pragma unroll
      for (int j = 0; j < Tile::kColumnPairs; ++j) {
        uint32_t fragments[4];
        const int column = warp_column_ + j * 16 + lane / 16 * 8;
        load_fragments_transposed(b + (k + lane % 16) * Tile::kPitchB + column, fragments);
#pragma unroll
        for (int part = 0; part < 3; ++part) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply_add<BF16>(a_parts[part][i], fragments[0], fragments[1], own_.sums[i][2 * j]);
            multiply_add<BF16>(a_parts[part][i], fragments[2], fragments[3],
                               own_.sums[i][2 * j + 1]);
          }
        }
      }
    }
  }

  SplitOperands operands_;
  SplitPart part_;
  std::byte* stages_;
  int warp_row_;
  int warp_column_;
  MmaSums<2, 2 * Tile::kColumnPairs> own_;
};

}  // namespace crossdock::router
