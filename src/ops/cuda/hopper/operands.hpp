#pragma once

#include "ops/cuda/grouped_product.hpp"
#include "ops/cuda/hopper/product_params.hpp"
#include "ops/cuda/hopper/tensor_map.hpp"

namespace crossdock::ops::hopper {

/// The operands of a product (product.cuh has a table of them) and the tiles it is cut into.
struct OperandSpec {
  Operation operation = Operation::kForward;
  DType dtype = DType::kBF16;
  const void* a = nullptr;
  const void* b = nullptr;
  ProductSizes sizes{};
  int tile_columns = 0;
  bool is_gated = false;     // forward: 8 gates and their 8 linear values alternate in a tile
  bool interleaved = false;  // gated: rows of w are gate 0, linear 0, gate 1, ...
};

OperandMaps make_operand_maps(TensorMaps& maps, const OperandSpec& spec);

/// Whether a row of a transposed operand is whole blocks of 64 values (ProductParams).
inline bool has_whole_blocks(int64_t width) {
  return width % kBlock == 0;
}

}  // namespace crossdock::ops::hopper
