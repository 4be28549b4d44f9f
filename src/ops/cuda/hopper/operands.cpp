#include "ops/cuda/hopper/operands.hpp"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::ops::hopper {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Looked up in the driver at run time, so that nothing links libcuda.
EncodeTiled find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kSince = 12000;
  CROSSDOCK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                                  cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw Error(ErrorCode::kCuda, "the driver has no cuTensorMapEncodeTiled; update it");
  }
  return reinterpret_cast<EncodeTiled>(function);
}

CUtensorMap encode(const TensorMapSpec& spec) {
  static const EncodeTiled kEncode = find_encode();
  constexpr std::array<cuuint32_t, TensorMapSpec::kMaxRank> kElementStrides = {1, 1, 1, 1, 1};
  std::array<cuuint64_t, TensorMapSpec::kMaxRank> sizes{};
  std::array<cuuint64_t, TensorMapSpec::kMaxRank - 1> strides{};
  std::copy(spec.sizes.begin(), spec.sizes.end(), sizes.begin());
  std::copy(spec.strides.begin(), spec.strides.end(), strides.begin());
  CUtensorMap map{};
  const CUresult result =
      kEncode(&map,
              spec.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
              static_cast<cuuint32_t>(spec.rank), const_cast<void*>(spec.data), sizes.data(),
              strides.data(), spec.box.data(), kElementStrides.data(),
              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::kCuda, concat("cuTensorMapEncodeTiled: error ", int{result}));
  }
  return map;
}

}  // namespace

CUtensorMap TensorMaps::get(const TensorMapSpec& spec) {
  const std::lock_guard lock(mutex_);
  if (const auto known = maps_.find(spec); known != maps_.end()) return known->second;
  if (maps_.size() >= kMaxKept) maps_.clear();
  return maps_.emplace(spec, encode(spec)).first->second;
}

namespace {

constexpr uint64_t kValueBytes = 2;
constexpr uint64_t kBlockWidth = kBlock;

uint64_t row_bytes(int64_t width) {
  return static_cast<uint64_t>(width) * kValueBytes;
}

// Boxes of box_rows rows and 64 columns, from [rows, width].
TensorMapSpec row_boxes(const void* data, DType dtype, int64_t rows, int64_t width, int box_rows) {
  return {.data = data,
          .dtype = dtype,
          .rank = 2,
          .sizes = {static_cast<uint64_t>(width), static_cast<uint64_t>(rows)},
          .strides = {row_bytes(width)},
          .box = {kDepth, static_cast<uint32_t>(box_rows)}};
}

// Boxes of 64 rows and box_blocks blocks of 64 columns, from [rows, width]. The tensor is viewed as
// blocks side by side; that is not possible if the last one is incomplete, since it would reach
// into the next row. Then boxes have one block, and their first column is a coordinate.
TensorMapSpec column_boxes(const void* data, DType dtype, int64_t rows, int64_t width,
                           int box_blocks) {
  const auto num_columns = static_cast<uint64_t>(width);
  const auto num_rows = static_cast<uint64_t>(rows);
  if (has_whole_blocks(width)) {
    return {.data = data,
            .dtype = dtype,
            .rank = 3,
            .sizes = {kBlockWidth, num_rows, num_columns / kBlockWidth},
            .strides = {row_bytes(width), kBlockWidth * kValueBytes},
            .box = {kBlock, kDepth, static_cast<uint32_t>(box_blocks)}};
  }
  return {.data = data,
          .dtype = dtype,
          .rank = 3,
          .sizes = {num_columns, num_rows, 1},
          .strides = {row_bytes(width), row_bytes(width) * num_rows},
          .box = {kBlock, kDepth, 1}};
}

// Boxes of box_rows rows and 64 columns, from w [E_local, N, K].
TensorMapSpec weight_row_boxes(const OperandSpec& spec, int box_rows) {
  const auto& [R, E_local, N, K] = spec.sizes;
  return {
      .data = spec.b,
      .dtype = spec.dtype,
      .rank = 3,
      .sizes = {static_cast<uint64_t>(K), static_cast<uint64_t>(N), static_cast<uint64_t>(E_local)},
      .strides = {row_bytes(K), row_bytes(K) * static_cast<uint64_t>(N)},
      .box = {kDepth, static_cast<uint32_t>(box_rows), 1}};
}

// The same, but 8 gates and their 8 linear values alternate: dimensions are K, 8 features, gate or
// linear, groups of 8 features, experts.
TensorMapSpec gated_row_boxes(const OperandSpec& spec, int box_rows) {
  const auto& [R, E_local, N, K] = spec.sizes;
  const auto F = static_cast<uint64_t>(N) / 2;
  const uint64_t row = row_bytes(K);
  const uint64_t next_feature = spec.interleaved ? 2 * row : row;
  const uint64_t linear = spec.interleaved ? row : F * row;
  return {.data = spec.b,
          .dtype = spec.dtype,
          .rank = 5,
          .sizes = {static_cast<uint64_t>(K), 8, 2, F / 8, static_cast<uint64_t>(E_local)},
          .strides = {next_feature, linear, 8 * next_feature, static_cast<uint64_t>(N) * row},
          .box = {kDepth, 8, 2, static_cast<uint32_t>(box_rows / 16), 1}};
}

// Boxes of 64 rows and blocks of 64 columns, from w [E_local, N, K].
TensorMapSpec weight_column_boxes(const OperandSpec& spec, int box_blocks) {
  const auto& [R, E_local, N, K] = spec.sizes;
  TensorMapSpec map = column_boxes(spec.b, spec.dtype, N, K, box_blocks);
  map.rank = 4;
  map.sizes[3] = static_cast<uint64_t>(E_local);
  map.strides[2] = row_bytes(K) * static_cast<uint64_t>(N);
  map.box[3] = 1;
  return map;
}

}  // namespace

OperandMaps make_operand_maps(TensorMaps& maps, const OperandSpec& spec) {
  const auto& [R, E_local, N, K] = spec.sizes;
  const int columns = spec.tile_columns;
  const int column_blocks = columns / kBlock;
  const int half_blocks = column_blocks % 2 == 0 ? column_blocks / 2 : 1;
  OperandMaps result{};
  if (spec.operation == Operation::kDw) {
    result.a_small = maps.get(column_boxes(spec.a, spec.dtype, R, N, 1));
    result.a_large = maps.get(column_boxes(spec.a, spec.dtype, R, N, 2));
    result.b_small = maps.get(column_boxes(spec.b, spec.dtype, R, K, half_blocks));
    result.b_large = maps.get(column_boxes(spec.b, spec.dtype, R, K, column_blocks));
    return result;
  }
  const int64_t inner = spec.operation == Operation::kForward ? K : N;
  result.a_small = maps.get(row_boxes(spec.a, spec.dtype, R, inner, kBlock));
  result.a_large = maps.get(row_boxes(spec.a, spec.dtype, R, inner, 2 * kBlock));
  if (spec.operation == Operation::kDx) {
    result.b_small = maps.get(weight_column_boxes(spec, half_blocks));
    result.b_large = maps.get(weight_column_boxes(spec, column_blocks));
  } else if (spec.is_gated) {
    result.b_small = maps.get(gated_row_boxes(spec, columns / 2));
    result.b_large = maps.get(gated_row_boxes(spec, columns));
  } else {
    result.b_small = maps.get(weight_row_boxes(spec, columns / 2));
    result.b_large = maps.get(weight_row_boxes(spec, columns));
  }
  return result;
}

namespace {

constexpr int64_t kMostColumns = int64_t{1} << 26;  // byte offsets in a row are 32-bit

bool is_aligned(const ConstTensorView& tensor, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0;
}

template <typename... Tensors>
bool fit(const ProductSizes& sizes, DType dtype, const Tensors&... tensors) {
  const bool is_narrow = sizes.N <= kMostColumns && sizes.K <= kMostColumns;
  return (dtype == DType::kBF16 || dtype == DType::kF16) && is_narrow && sizes.N % 8 == 0 &&
         sizes.K % 8 == 0 && (is_aligned(tensors, 16) && ...);
}

}  // namespace

bool load_products() {
  int major = 0;
  int minor = 0;
  const int device = cuda::current_device();
  CROSSDOCK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CROSSDOCK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0) return false;
  return load_forward() && load_swiglu() && load_dx() && load_dw();
}

bool takes(const ProductForwardArgs& args, const ProductSizes& sizes) {
  const bool is_gated = args.epilogue != ProductEpilogue::kNone;
  return fit(sizes, args.x.dtype, args.x, args.w, args.out, args.hidden) &&
         is_aligned(args.bias, 4) && (!is_gated || sizes.N % 16 == 0);
}

bool takes(const ProductDxArgs& args, const ProductSizes& sizes) {
  return fit(sizes, args.grad.dtype, args.grad, args.w, args.out);
}

bool takes(const ProductDwArgs& args, const ProductSizes& sizes) {
  return fit(sizes, args.grad.dtype, args.grad, args.x, args.out);
}

void launch_product(const ProductForwardArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context) {
  if (args.epilogue == ProductEpilogue::kNone) {
    launch_rows_forward(args, sizes, context);
  } else {
    launch_swiglu_forward(args, sizes, context);
  }
}

}  // namespace crossdock::ops::hopper
