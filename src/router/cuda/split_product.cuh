#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "crossdock/dtype.hpp"
#include "ops/gemm.hpp"

namespace crossdock::router {

// The instructions of tensor-core products, sm_80 and later. A warp holds matrices of 16-bit values
// in fragments of 8 x 8 values, where lane l has values 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Starts copying 16 bytes to shared memory; zeros if there is nothing to copy.
__device__ inline void copy_async(void* to, const void* from, bool is_there) {
  const int num_bytes = is_there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(num_bytes)
               : "memory");
}

/// Ends a group of copies.
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending groups of this thread are pending.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four fragments from shared memory: lanes 8 m to 8 m + 7 give the addresses of the rows of
/// fragment m, 16 bytes each.
__device__ inline void load_fragments(const void* row, uint32_t (&fragments)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

/// The same, each fragment transposed.
__device__ inline void load_fragments_transposed(const void* row, uint32_t (&fragments)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

/// c += a b^T with a [16, 16] and b [8, 16], sums in fp32. Fragments of a: rows 0 to 7 and 8 to 15
/// of the first 8 columns, then of the others; of b: the first 8 columns, then the others. Lane l
/// has c[l / 4, 2 (l % 4)] and the next one, then the same of row l / 4 + 8.
template <typename Element>
__device__ void multiply_add(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]);

template <>
__device__ inline void multiply_add<BF16>(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                          float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply_add<F16>(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two floats rounded to bf16, the first in the lower half.
__device__ inline uint32_t pack_bf16(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16 | __bfloat16_as_ushort(pair.x);
}

// Shared by the products on tensor cores: copying operands to shared memory, and a warp's sums.

/// A part of a matrix. Elements from end_row and end_column on count as zero.
struct MatrixPart {
  int64_t row = 0;
  int64_t end_row = 0;
  int64_t column = 0;
  int64_t end_column = 0;
  int64_t stride = 0;             // elements from row to row
  const int32_t* kept = nullptr;  // optional: rows where it is negative count as zero
};

/// Copies kRows x kColumns elements to shared memory with kThreads threads. kCopiesVectors: 16
/// bytes at a time, to which rows must be aligned; wait_for_copies waits for the copies.
template <int kRows, int kColumns, int kPitch, int kThreads, bool kCopiesVectors, typename Element>
__device__ void copy_part(const Element* matrix, const MatrixPart& part, Element* to) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(Element));
  constexpr int kChunks = kColumns / kCount;
  static_assert(kRows * kChunks % kThreads == 0);
#pragma unroll
  for (int n = 0; n < kRows * kChunks / kThreads; ++n) {
    const int chunk = static_cast<int>(threadIdx.x) + n * kThreads;
    const int64_t row = part.row + chunk / kChunks;
    const int64_t column = part.column + chunk % kChunks * kCount;
    Element* to_chunk = to + chunk / kChunks * kPitch + chunk % kChunks * kCount;
    const bool has_row = row < part.end_row && (part.kept == nullptr || part.kept[row] >= 0);
    const Element* from = matrix + row * part.stride + column;
    if constexpr (kCopiesVectors) {
      const bool is_there = has_row && column < part.end_column;
      copy_async(to_chunk, is_there ? from : matrix, is_there);
    } else {
      for (int j = 0; j < kCount; ++j) {
        to_chunk[j] = has_row && column + j < part.end_column ? from[j] : Element{};
      }
    }
  }
}

/// A warp's elements of a product: tiles of 16 x 8.
template <int kRowTiles, int kColumnTiles>
struct MmaSums {
  float sums[kRowTiles][kColumnTiles][4] = {};    // of the current block of k
  float totals[kRowTiles][kColumnTiles][4] = {};  // of the blocks before it

  __device__ void end_block(bool is_first) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          totals[i][j][n] = is_first ? sums[i][j][n] : totals[i][j][n] + sums[i][j][n];
          sums[i][j][n] = 0.0f;
        }
      }
    }
  }

  /// Calls store(row, column, first, second) for adjacent pairs, from the warp's first row and
  /// column on.
  template <typename Store>
  __device__ void store_totals(int64_t first_row, int64_t first_column, const Store& store) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const int64_t row = first_row + i * 16 + lane / 4;
        const int64_t column = first_column + j * 8 + lane % 4 * 2;
        store(row, column, totals[i][j][0], totals[i][j][1]);
        store(row + 8, column, totals[i][j][2], totals[i][j][3]);
      }
    }
  }
};

// Products of an fp32 and a bf16 matrix on tensor cores, as exact as sums in fp32: an fp32 element
// is the sum of three bf16 numbers, so its product with a bf16 element is the sum of three exact
// products. k runs in blocks of ops::kGemmBlockK, whose sums are added in fp32 in ascending order.

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
