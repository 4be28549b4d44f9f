// DLPack's binary interface (https://dmlc.github.io/dlpack, version 1), as far as it is used here.
#pragma once

#include <cstdint>

extern "C" {

enum : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAManaged = 13 };  // DLDevice::device_type
enum : uint8_t {                                                  // DLDataType::code
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLBool = 6,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e8m0fnu = 14
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
  int64_t* strides;
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
