#pragma once

#include <cstdint>

#include "ops/cuda/hopper/tensor_map.hpp"
#include "ops/cuda/hopper/tile_shape.hpp"
#include "ops/cuda/hopper/tma.cuh"

// Rows of a matrix in blocks of 64 columns, [block][row][64] in shared memory. The copy engine
// takes its time for every box, so that all blocks are one box if the width of the matrix allows
// it.

namespace crossdock::router::hopper {

/// num_blocks blocks of num_rows rows at a time.
struct ColumnBoxes {
  int num_rows = 0;
  int num_blocks = 0;
  bool is_one = false;  // all blocks are one box; else each is

  static ColumnBoxes of(int64_t width, int num_rows, int num_blocks) {
    return {num_rows, num_blocks, width % ops::hopper::kBlock == 0};
  }

  __host__ __device__ int block_bytes() const { return num_rows * 128; }

  ops::hopper::TensorMapSpec spec(const void* data, DType dtype, int64_t width,
                                  int64_t all_rows) const {
    constexpr uint64_t kColumns = ops::hopper::kBlock;
    const auto columns = static_cast<uint64_t>(width);
    const uint64_t inner = is_one ? kColumns : columns;
    return {.data = data,
            .dtype = dtype,
            .rank = 3,
            .sizes = {inner, static_cast<uint64_t>(all_rows), columns / inner},
            .strides = {columns * 2, inner * 2},
            .box = {kColumns, static_cast<uint32_t>(num_rows),
                    is_one ? static_cast<uint32_t>(num_blocks) : 1}};
  }

#if defined(__CUDACC__)
  /// Loads the blocks from `column` on. Those outside the matrix become zero, and count as bytes.
  __device__ void load(const CUtensorMap* map, const ops::hopper::BoxTarget& to, int column,
                       int row) const {
    if (is_one) return ops::hopper::load_box(map, to, 0, row, column / ops::hopper::kBlock);
    for (int block = 0; block < num_blocks; ++block) {
      ops::hopper::load_box(
          map, {to.address + static_cast<uint32_t>(block * block_bytes()), to.barrier, to.to_both},
          column + block * ops::hopper::kBlock, row, 0);
    }
  }

  /// Stores them; what is outside the matrix is left out.
  __device__ void store(const CUtensorMap* map, ops::hopper::SharedAddress from, int column,
                        int row) const {
    if (is_one) return ops::hopper::store_box(map, from, 0, row, column / ops::hopper::kBlock);
    for (int block = 0; block < num_blocks; ++block) {
      ops::hopper::store_box(map, from + static_cast<uint32_t>(block * block_bytes()),
                             column + block * ops::hopper::kBlock, row, 0);
    }
  }
#endif
};

}  // namespace crossdock::router::hopper
