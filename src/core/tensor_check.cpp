#include "core/tensor_check.hpp"

#include "core/check.hpp"

namespace crossdock {

std::string describe(const ConstTensorView& tensor) {
  if (!tensor.given()) return "nothing";
  return concat(tensor.shape.to_string(), " ", name_of(tensor.dtype));
}

void check_memory(std::string_view name, const ConstTensorView& tensor) {
  CROSSDOCK_CHECK(tensor.device.is_cpu(), name, " must be in host memory");
  CROSSDOCK_CHECK(tensor.data != nullptr || tensor.num_elements() == 0, name, " of shape ",
                  tensor.shape.to_string(), " must have memory, got a null pointer");
}

void check_tensor(std::string_view name, const ConstTensorView& tensor, const Shape& shape) {
  CROSSDOCK_CHECK(tensor.given() && tensor.shape == shape, name, " must be ", shape.to_string(),
                  ", got ", describe(tensor));
  check_memory(name, tensor);
}

void check_tensor(std::string_view name, const ConstTensorView& tensor, DType dtype,
                  const Shape& shape) {
  CROSSDOCK_CHECK(tensor.given() && tensor.dtype == dtype && tensor.shape == shape, name,
                  " must be ", shape.to_string(), " ", name_of(dtype), ", got ", describe(tensor));
  check_memory(name, tensor);
}

}  // namespace crossdock
