#include "core/tensor_check.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>

#include "core/check.hpp"

namespace crossdock {
namespace {

// Empty tensors overlap nothing. std::less orders pointers of different arrays.
bool overlap(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.num_bytes() == 0 || b.num_bytes() == 0) return false;
  const auto* a_begin = static_cast<const std::byte*>(a.data);
  const auto* b_begin = static_cast<const std::byte*>(b.data);
  const std::less<> before;
  return before(a_begin, b_begin + b.num_bytes()) && before(b_begin, a_begin + a.num_bytes());
}

}  // namespace

std::string describe(const ConstTensorView& tensor) {
  if (!tensor.given()) return "nothing";
  return concat(tensor.shape.to_string(), " ", name_of(tensor.dtype));
}

std::string describe(Device device) {
  return device.is_cpu() ? "in host memory" : concat("on GPU ", device.index);
}

void check_not_null(std::string_view name, const ConstTensorView& tensor) {
  CROSSDOCK_CHECK(tensor.data != nullptr || tensor.num_elements() == 0, name, " of shape ",
                  tensor.shape.to_string(), " must have memory, got a null pointer");
}

void check_memory(std::string_view name, const ConstTensorView& tensor) {
  check_memory(name, tensor, Device{});
}

void check_memory(std::string_view name, const ConstTensorView& tensor, Device device) {
  const bool is_there = device.is_cpu() ? tensor.device.is_cpu() : tensor.device == device;
  CROSSDOCK_CHECK(is_there, name, " must be ", describe(device), ", it is ",
                  describe(tensor.device));
  check_not_null(name, tensor);
}

void check_tensor(std::string_view name, const ConstTensorView& tensor, const Shape& shape) {
  CROSSDOCK_CHECK(tensor.given() && tensor.shape == shape, name, " must be ", shape.to_string(),
                  ", got ", describe(tensor));
  check_memory(name, tensor);
}

void check_tensor(std::string_view name, const ConstTensorView& tensor, DType dtype,
                  const Shape& shape) {
  check_tensor(name, tensor, Device{}, dtype, shape);
}

void check_tensor(std::string_view name, const ConstTensorView& tensor, Device device, DType dtype,
                  const Shape& shape) {
  CROSSDOCK_CHECK(tensor.given() && tensor.dtype == dtype && tensor.shape == shape, name,
                  " must be ", shape.to_string(), " ", name_of(dtype), ", got ", describe(tensor));
  check_memory(name, tensor, device);
}

void check_no_overlap(const std::vector<NamedTensor>& outputs,
                      const std::vector<NamedTensor>& inputs) {
  const auto check_pair = [](const NamedTensor& output, const NamedTensor& other) {
    CROSSDOCK_CHECK(!overlap(output.tensor, other.tensor), output.name, " overlaps ", other.name,
                    "; outputs must have memory of their own");
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const NamedTensor& input : inputs) check_pair(outputs[i], input);
    for (size_t j = 0; j < i; ++j) check_pair(outputs[i], outputs[j]);
  }
}

void check_apart(std::vector<NamedTensor> tensors) {
  // If any two overlap, so do two neighbours in address order.
  std::erase_if(tensors, [](const NamedTensor& one) { return one.tensor.num_bytes() == 0; });
  std::stable_sort(tensors.begin(), tensors.end(), [](const NamedTensor& a, const NamedTensor& b) {
    return std::less<>()(a.tensor.data, b.tensor.data);
  });
  for (size_t i = 1; i < tensors.size(); ++i) {
    CROSSDOCK_CHECK(!overlap(tensors[i - 1].tensor, tensors[i].tensor), tensors[i].name,
                    " overlaps ", tensors[i - 1].name, "; each tensor must have its own memory");
  }
}

}  // namespace crossdock
