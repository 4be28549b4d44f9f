// The parts of DLPack's binary interface that are used here (https://dmlc.github.io/dlpack, version
// 1).
#pragma once

#include <cstdint>

extern "C" {

enum : int32_t { kDLCPU = 1 };                                            // DLDevice::device_type
enum : uint8_t { kDLInt = 0, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };  // DLDataType::code

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

struct DLPackExchangeHeader {
  DLPackVersion version;
  DLPackExchangeHeader* older;
};

/// The target of a framework's `Tensor.__dlpack_c_exchange_api__`.
struct DLPackExchangeAPI {
  DLPackExchangeHeader header;
  void (*managed_tensor_allocator)();
  void (*managed_tensor_from_py_object_no_sync)();
  void (*managed_tensor_to_py_object_no_sync)();
  /// Describes a Python tensor without owning it. May be null. Returns nonzero on failure, with a
  /// Python error set.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  void (*current_work_stream)();
};

}  // extern "C"
