#include "capi/tensors.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "capi/status.hpp"
#include "core/check.hpp"
#include "crossdock/cuda.hpp"

namespace crossdock::capi {
namespace {

static_assert(1 + static_cast<int>(DType::kF64) == CROSSDOCK_F64);
static_assert(1 + static_cast<int>(DType::kF32) == CROSSDOCK_F32);
static_assert(1 + static_cast<int>(DType::kBF16) == CROSSDOCK_BF16);
static_assert(1 + static_cast<int>(DType::kF16) == CROSSDOCK_F16);
static_assert(1 + static_cast<int>(DType::kF8E4M3) == CROSSDOCK_F8E4M3);
static_assert(1 + static_cast<int>(DType::kE8M0) == CROSSDOCK_E8M0);
static_assert(1 + static_cast<int>(DType::kI64) == CROSSDOCK_I64);
static_assert(1 + static_cast<int>(DType::kI32) == CROSSDOCK_I32);
static_assert(1 + static_cast<int>(DType::kU8) == CROSSDOCK_U8);
static_assert(1 + static_cast<int>(DType::kBool) == CROSSDOCK_BOOL);
static_assert(static_cast<int>(DeviceKind::kCpu) == CROSSDOCK_CPU);
static_assert(static_cast<int>(DeviceKind::kCuda) == CROSSDOCK_CUDA);

Shape to_shape(const crossdock_tensor& tensor) {
  return Shape(std::span(tensor.shape).first(static_cast<size_t>(tensor.num_dims)));
}

}  // namespace

DType to_dtype(const char* name, int32_t dtype) {
  CROSSDOCK_CHECK(dtype >= CROSSDOCK_F64 && dtype <= CROSSDOCK_BOOL, name,
                  ": dtype must be one of CROSSDOCK_F64 (", CROSSDOCK_F64, ") to CROSSDOCK_BOOL (",
                  CROSSDOCK_BOOL, "), got ", dtype);
  return static_cast<DType>(dtype - 1);
}

TensorView to_view(const char* name, const crossdock_tensor& tensor) {
  if (tensor.num_dims == 0) return {};
  CROSSDOCK_CHECK(tensor.num_dims > 0 && tensor.num_dims <= Shape::kMaxRank, name,
                  ": num_dims must be in [0, ", Shape::kMaxRank, "], got ", tensor.num_dims);
  CROSSDOCK_CHECK(tensor.device_kind == CROSSDOCK_CPU || tensor.device_kind == CROSSDOCK_CUDA, name,
                  ": device_kind must be CROSSDOCK_CPU (0) or CROSSDOCK_CUDA (1), got ",
                  tensor.device_kind);
  const bool is_cpu = tensor.device_kind == CROSSDOCK_CPU;
  const Device device{.kind = static_cast<DeviceKind>(tensor.device_kind),
                      .index = is_cpu ? 0 : tensor.device_index};
  return {tensor.data, to_dtype(name, tensor.dtype), to_shape(tensor), device};
}

TensorView to_view(const char* name, const crossdock_tensor* tensor) {
  return to_view(name, pointee(name, tensor));
}

std::vector<TensorView> to_views(const char* name, const crossdock_tensor* tensors, int64_t count) {
  CROSSDOCK_CHECK(count >= 0, name, ": the number of tensors must not be negative, got ", count);
  CROSSDOCK_CHECK(count == 0 || tensors != nullptr, name, " must not be NULL");
  std::vector<TensorView> views;
  for (int64_t i = 0; i < count; ++i) views.push_back(to_view(name, tensors[i]));
  return views;
}

crossdock_tensor from_view(const ConstTensorView& view) {
  crossdock_tensor tensor{};
  tensor.data = const_cast<void*>(view.data);  // C has one type for inputs and outputs
  tensor.num_dims = view.shape.rank();
  for (int i = 0; i < view.shape.rank(); ++i) tensor.shape[i] = view.shape[i];
  tensor.dtype = 1 + static_cast<int32_t>(view.dtype);
  tensor.device_kind = static_cast<int32_t>(view.device.kind);
  tensor.device_index = view.device.index;
  return tensor;
}

void check_no_owner(const char* name, const crossdock_output& output) {
  CROSSDOCK_CHECK(output.owner == nullptr, name,
                  ": owner must be NULL before the call; release the previous result first");
}

TensorView given_output(const char* name, const crossdock_output& output) {
  check_no_owner(name, output);
  return to_view(name, output.tensor);
}

TensorView given_output(const char* name, const crossdock_output* output) {
  return given_output(name, pointee(name, output));
}

void set_outputs(std::span<const Result> results, const MemorySource& source) {
  std::vector<std::unique_ptr<crossdock_memory>> owners;
  for (const Result& result : results) {
    owners.push_back(nullptr);
    if (result.output == nullptr || result.tensor->owner == nullptr) continue;
    owners.back() = std::make_unique<crossdock_memory>(source.group, result.tensor->owner);
    owners.back()->device = result.tensor->view.device;
    owners.back()->stream = source.stream;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const OwnedTensor& tensor = *results[i].tensor;
    if (results[i].output == nullptr || !tensor.view.given()) continue;
    *results[i].output = {.tensor = from_view(tensor.view), .owner = owners[i].release()};
  }
}

void release(crossdock_output* output, void* stream) {
  crossdock_memory* const owner = pointee("output", output).owner;
  if (owner == nullptr) return;
  CROSSDOCK_CHECK(owner->is_of_this_kind(),
                  "output.owner must be the one that a call of the library set");
  *output = {};
  if (owner->is_of_parent()) return;
  const std::unique_ptr<crossdock_memory> memory(owner);
  if (memory->device.is_cpu() || stream == memory->stream.handle) return;
  // The memory returns to its pool in the order of the stream in which it was allocated.
  make_stream_wait(memory->stream, Stream{stream}, memory->device);
}

}  // namespace crossdock::capi

using namespace crossdock;

crossdock_status crossdock_output_release(crossdock_output* output, void* stream) {
  return capi::guarded([&] { capi::release(output, stream); });
}
