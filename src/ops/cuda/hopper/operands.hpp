#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <compare>
#include <cstddef>
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

// Grouped products on Hopper GPUs (sm_90a), for checked arguments.

/// Loads all kernels onto the current device. False if they do not run there, because of the device
/// or because of how they were compiled.
bool load_products();

// Whether the kernels take these arguments.
bool takes(const ProductForwardArgs& args, const ProductSizes& sizes);
bool takes(const ProductDxArgs& args, const ProductSizes& sizes);
bool takes(const ProductDwArgs& args, const ProductSizes& sizes);

/// What a launch needs besides its arguments.
struct LaunchContext {
  TensorMaps& maps;
  int num_sms;
  cudaStream_t stream;
  int32_t* counters;      // [2], zero; exclusive: used by no concurrent kernel
  std::byte* dw_scratch;  // dW: dw_scratch_bytes, exclusive
};

int64_t dw_scratch_bytes(int64_t E_local);

// REQUIRES: takes(args, sizes), R > 0, E_local > 0, and the device is current.
void launch_product(const ProductForwardArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context);
void launch_product(const ProductDxArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context);
void launch_product(const ProductDwArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context);

// Used by the functions above, one per source file.
void launch_rows_forward(const ProductForwardArgs& args, const ProductSizes& sizes,
                         const LaunchContext& context);
void launch_swiglu_forward(const ProductForwardArgs& args, const ProductSizes& sizes,
                           const LaunchContext& context);
bool load_forward();
bool load_swiglu();
bool load_dx();
bool load_dw();

}  // namespace crossdock::ops::hopper
