#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/warp_mma.cuh"

// Shared by the products on tensor cores: copying operands to shared memory, and a warp's sums.

namespace crossdock::ops {

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

}  // namespace crossdock::ops
