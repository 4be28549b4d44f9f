#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "crossdock/dtype.hpp"

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

}  // namespace crossdock::router
