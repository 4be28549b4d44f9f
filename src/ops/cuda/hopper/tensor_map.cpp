#include "ops/cuda/hopper/tensor_map.hpp"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/check.hpp"
#include "core/cuda/check.hpp"

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

}  // namespace crossdock::ops::hopper
