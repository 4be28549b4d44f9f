#pragma once

#include <cuda.h>

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <mutex>

#include "crossdock/dtype.hpp"
#include "ops/cuda/grouped_product.hpp"
#include "ops/cuda/hopper/product_params.hpp"

namespace crossdock::ops::hopper {

/// A tensor of 16-bit values in global memory, and the box of it that one load copies to shared
/// memory, with 128-byte swizzle. Innermost dimension first; its elements are contiguous.
struct TensorMapSpec {
  static constexpr int kMaxRank = 5;

  const void* data = nullptr;  // 16-byte aligned
  DType dtype = DType::kBF16;  // or fp16
  int rank = 0;
  std::array<uint64_t, kMaxRank> sizes{};
  std::array<uint64_t, kMaxRank - 1> strides{};  // of dimensions 1 and up, in bytes
  std::array<uint32_t, kMaxRank> box{};

  // NOLINTNEXTLINE(modernize-use-nullptr): finds a 0 in it
  friend auto operator<=>(const TensorMapSpec&, const TensorMapSpec&) = default;
};

/// Encodes tensor maps and keeps them: encoding takes longer than a launch. A map holds addresses
/// only, so it stays valid when memory is freed and taken again. Thread-safe.
class TensorMaps {
 public:
  /// Throws Error(kCuda) if the driver refuses.
  CUtensorMap get(const TensorMapSpec& spec);

 private:
  static constexpr size_t kMaxKept = 4096;  // then all are dropped

  std::mutex mutex_;
  std::map<TensorMapSpec, CUtensorMap> maps_;
};

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
