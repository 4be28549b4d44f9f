// Shares memory with other libraries through DLPack (https://dmlc.github.io/dlpack).
#include "capi/dlpack.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"
#include "core/check.hpp"

namespace crossdock::capi {
namespace {

DLDataType to_dlpack(int32_t dtype) {
  for (const dlpack::SharedDType& known : dlpack::kDTypes) {
    if (known.dtype == dtype) return {.code = known.code, .bits = known.bits, .lanes = 1};
  }
  throw Error(ErrorCode::kInternal, "a dtype has no counterpart in DLPack");
}

std::string text_of(const int64_t* values, int32_t size) {
  std::string text = "(";
  for (int32_t i = 0; i < size; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + ")";
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
    shared->managed.dl_tensor = {.data = view.data,
                                 .device = {.device_type = view.device.is_cpu() ? kDLCPU : kDLCUDA,
                                            .device_id = view.device.index},
                                 .ndim = view.shape.rank(),
                                 .dtype = capi::to_dlpack(given.tensor.dtype),
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
  static const auto kIsValid =
      reinterpret_cast<int (*)(void*, const char*)>(dlsym(RTLD_DEFAULT, "PyCapsule_IsValid"));
  static const auto kPointerIn =
      reinterpret_cast<void* (*)(void*, const char*)>(dlsym(RTLD_DEFAULT, "PyCapsule_GetPointer"));
  constexpr const char* kName = "dltensor";
  if (kIsValid == nullptr || kPointerIn == nullptr || kIsValid(capsule, kName) == 0) return;
  auto* tensor = static_cast<DLManagedTensor*>(kPointerIn(capsule, kName));
  tensor->deleter(tensor);
}

crossdock_status crossdock_tensor_from_dlpack(const void* managed_tensor,
                                              crossdock_tensor* tensor) {
  return capi::guarded([&] {
    const auto* managed = static_cast<const DLManagedTensor*>(managed_tensor);
    const DLTensor& given = capi::pointee("managed_tensor", managed).dl_tensor;
    crossdock_tensor& described = capi::pointee("tensor", tensor);
    CROSSDOCK_CHECK(dlpack::dtype_of(given.dtype) != 0,
                    "the dtype must be one of crossdock_tensor.dtype, got code ",
                    int{given.dtype.code}, " with ", int{given.dtype.bits}, " bits of DLPack");
    CROSSDOCK_CHECK(given.ndim >= 1 && given.ndim <= 4, "tensors must have 1 to 4 dimensions, got ",
                    given.ndim);
    CROSSDOCK_CHECK(dlpack::is_contiguous(given), "tensors must be contiguous, got shape ",
                    capi::text_of(given.shape, given.ndim), " with strides ",
                    capi::text_of(given.strides, given.ndim));
    CROSSDOCK_CHECK(dlpack::is_on_host(given) || dlpack::is_on_gpu(given),
                    "tensors must be in memory of the CPU (1) or of CUDA (2), got DLPack device "
                    "type ",
                    given.device.device_type);
    described = dlpack::tensor_of(given);
  });
}
