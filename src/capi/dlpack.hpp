// DLPack's binary interface (https://dmlc.github.io/dlpack, version 1), as far as it is used here.
// Also for python/native.
#pragma once

#include <cstdint>

#include "crossdock/crossdock.h"

extern "C" {

enum : int32_t {
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3,
  kDLCUDAManaged = 13
};                // DLDevice::device_type
enum : uint8_t {  // DLDataType::code
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLBool = 6,
  kDLFloat8E4M3 = 10,
  kDLFloat8E8M0 = 14
};

struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
};

struct DLPackExchangeHeader {
  DLPackVersion version;
  DLPackExchangeHeader* older;
};

/// The target of a framework's `Tensor.__dlpack_c_exchange_api__`. Functions return nonzero on
/// failure, with a Python error set.
struct DLPackExchangeAPI {
  DLPackExchangeHeader header;
  void (*managed_tensor_allocator)();
  void (*managed_tensor_from_py_object_no_sync)();
  /// Makes a Python tensor that takes over `tensor`.
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* tensor, void** py_object);
  /// Describes a Python tensor without owning it. May be null.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // extern "C"

namespace crossdock::dlpack {

/// A dtype of both.
struct SharedDType {
  int32_t dtype;  // of a crossdock_tensor
  uint8_t code;
  uint8_t bits;
};

inline constexpr SharedDType kDTypes[] = {
    {CROSSDOCK_F64, kDLFloat, 64},        {CROSSDOCK_F32, kDLFloat, 32},
    {CROSSDOCK_BF16, kDLBfloat, 16},      {CROSSDOCK_F16, kDLFloat, 16},
    {CROSSDOCK_F8E4M3, kDLFloat8E4M3, 8}, {CROSSDOCK_E8M0, kDLFloat8E8M0, 8},
    {CROSSDOCK_I64, kDLInt, 64},          {CROSSDOCK_I32, kDLInt, 32},
    {CROSSDOCK_U8, kDLUInt, 8},           {CROSSDOCK_BOOL, kDLBool, 8}};

/// 0: none.
inline int32_t dtype_of(DLDataType given) {
  for (const SharedDType& known : kDTypes) {
    if (given.code == known.code && given.bits == known.bits && given.lanes == 1) {
      return known.dtype;
    }
  }
  return 0;
}

inline bool is_contiguous(const DLTensor& tensor) {
  int64_t expected = 1;
  bool is_dense = true;
  for (int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
    is_dense = is_dense && (tensor.strides == nullptr || tensor.shape[dim] == 1 ||
                            tensor.strides[dim] == expected);
    expected *= tensor.shape[dim];
  }
  return is_dense || expected == 0;  // without values, strides mean nothing
}

inline bool is_on_gpu(const DLTensor& tensor) {
  const int32_t kind = tensor.device.device_type;
  return kind == kDLCUDA || kind == kDLCUDAManaged;
}

inline bool is_on_host(const DLTensor& tensor) {
  const int32_t kind = tensor.device.device_type;
  return kind == kDLCPU || kind == kDLCUDAHost;
}

/// REQUIRES: a known dtype and device, at most 4 dimensions. Without its strides.
inline crossdock_tensor tensor_of(const DLTensor& tensor) {
  crossdock_tensor made = {};
  if (tensor.data != nullptr) made.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  for (int32_t dim = 0; dim < tensor.ndim; ++dim) made.shape[dim] = tensor.shape[dim];
  made.num_dims = tensor.ndim;
  made.dtype = dtype_of(tensor.dtype);
  made.device_kind = is_on_gpu(tensor) ? CROSSDOCK_CUDA : CROSSDOCK_CPU;
  made.device_index = is_on_gpu(tensor) ? tensor.device.device_id : 0;
  return made;
}

}  // namespace crossdock::dlpack
