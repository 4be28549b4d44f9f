#pragma once

#include <cuda.h>

#include <cstdint>

#include "ops/cuda/hopper/tile_shape.hpp"
#include "ops/cuda/unused_rows.hpp"

namespace crossdock::ops::hopper {

enum class Operation : uint8_t { kForward, kDx, kDw };

/// Tensor maps of the two operands. Rows (of dW: columns) of A come in boxes of one and of two
/// blocks, columns of B in boxes of half a tile and of a tile.
struct OperandMaps {
  CUtensorMap a_small;
  CUtensorMap a_large;
  CUtensorMap b_small;
  CUtensorMap b_large;
};

/// Where gate and linear value f are in a row of the product, or of the bias.
struct GatePlaces {
  int step;           // gate f is at f * step
  int linear_offset;  // its linear value is this far behind
};

/// One expert of a dW, in the order of work: largest first, so that the last units are small.
struct OrderedExpert {
  int32_t expert;
  int32_t num_rows;
};

/// The parameters of a product kernel, besides the tensor maps.
struct ProductParams {
  const int64_t* starts;  // [num_experts + 1]
  const int64_t* counts;  // [num_experts]
  int num_experts;
  int N;  // w is [num_experts, N, K]
  int K;

  void* out;
  void* hidden;      // SwiGLU: the product, or null
  const void* bias;  // forward: [num_experts, N], or null
  GatePlaces gates;
  UnusedRows unused;  // of `out`

  // Whether the columns of a transposed operand are whole blocks of 64. If not, it is loaded block
  // by block, because a box of several blocks would reach into the next row.
  bool whole_a_blocks;
  bool whole_b_blocks;

  int32_t* counters;  // [2]: units drawn, clusters that have ended; zero before and after

  // dW
  const OrderedExpert* order;      // [num_experts]
  const OperandMaps* expert_maps;  // [num_experts] in that order, bounded to the expert's rows
};

}  // namespace crossdock::ops::hopper
