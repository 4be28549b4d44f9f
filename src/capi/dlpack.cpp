// Shares the library's memory with other libraries through DLPack (https://dmlc.github.io/dlpack).
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <memory>

#include "capi/status.hpp"
#include "capi/tensors.hpp"
#include "core/check.hpp"

namespace crossdock::capi {
namespace {

// DLPack's structs as of version 0; later versions keep them.
struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
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

constexpr int32_t kCpuDevice = 1;
constexpr int32_t kCudaDevice = 2;

DLDataType to_dlpack(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return {2, 64, 1};
    case DType::kF32:
      return {2, 32, 1};
    case DType::kBF16:
      return {4, 16, 1};
    case DType::kF16:
      return {2, 16, 1};
    case DType::kF8E4M3:
      return {10, 8, 1};
    case DType::kE8M0:
      return {14, 8, 1};
    case DType::kI64:
      return {0, 64, 1};
    case DType::kI32:
      return {0, 32, 1};
    case DType::kU8:
      return {1, 8, 1};
    case DType::kBool:
      return {6, 8, 1};
  }
  throw Error(ErrorCode::kInternal, "a dtype has no counterpart in DLPack");
}

// A tensor that shares the memory of an output.
struct SharedTensor {
  DLManagedTensor managed{};
  std::array<int64_t, 4> shape{};
  crossdock_output output{};
  void* stream = nullptr;
};

// Not a guarded call: in Python the thread holds the GIL, so it must not stop here while Python
// exits.
void destroy_shared(DLManagedTensor* self) noexcept {
  const std::unique_ptr<SharedTensor> shared(static_cast<SharedTensor*>(self->manager_ctx));
  caught([&] { release(&shared->output, shared->stream); });
}

}  // namespace
}  // namespace crossdock::capi

using namespace crossdock;

crossdock_status crossdock_output_to_dlpack(const crossdock_output* output, void* stream,
                                            void** managed_tensor) {
  return capi::guarded([&] {
    const crossdock_output& given = capi::pointee("output", output);
    void*& made = capi::pointee("managed_tensor", managed_tensor);
    const TensorView view = capi::to_view("output", given.tensor);
    CROSSDOCK_CHECK(view.given(), "output must be the result of a call");

    auto shared = std::make_unique<capi::SharedTensor>();
    for (int i = 0; i < view.shape.rank(); ++i) {
      shared->shape[static_cast<size_t>(i)] = view.shape[i];
    }
    shared->managed.dl_tensor = {
        .data = view.data,
        .device_type = view.device.is_cpu() ? capi::kCpuDevice : capi::kCudaDevice,
        .device_id = view.device.index,
        .ndim = view.shape.rank(),
        .dtype = capi::to_dlpack(view.dtype),
        .shape = shared->shape.data(),
        .strides = nullptr,
        .byte_offset = 0};
    shared->managed.manager_ctx = shared.get();
    shared->managed.deleter = capi::destroy_shared;
    shared->stream = stream;
    if (given.owner != nullptr || view.num_elements() > 0) {  // an empty result may have no memory
      const crossdock_memory& memory = capi::handle("output.owner", given.owner);
      auto owner = std::make_unique<crossdock_memory>(memory.group, memory.owner);
      owner->device = memory.device;
      owner->stream = memory.stream;
      shared->output = {.tensor = given.tensor, .owner = owner.release()};
    }
    made = &shared.release()->managed;
  });
}

void crossdock_destroy_dlpack_capsule(void* capsule) {
  // Python's own functions; this library is not linked to Python.
  static const auto is_valid =
      reinterpret_cast<int (*)(void*, const char*)>(dlsym(RTLD_DEFAULT, "PyCapsule_IsValid"));
  static const auto pointer_in =
      reinterpret_cast<void* (*)(void*, const char*)>(dlsym(RTLD_DEFAULT, "PyCapsule_GetPointer"));
  constexpr const char* kName = "dltensor";
  if (is_valid == nullptr || pointer_in == nullptr || is_valid(capsule, kName) == 0) return;
  auto* tensor = static_cast<capi::DLManagedTensor*>(pointer_in(capsule, kName));
  tensor->deleter(tensor);
}
