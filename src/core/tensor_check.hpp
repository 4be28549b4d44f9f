#pragma once

#include <string_view>

#include "core/check.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// Throws unless the tensor has this dtype and shape, is on the CPU, and has memory if it has
/// elements. `name` is the caller's word for it.
inline void check_tensor(std::string_view name, const ConstTensorView& tensor, DType dtype,
                         const Shape& shape) {
  CROSSDOCK_CHECK(tensor.given(), name, " must be given: ", name_of(dtype), " ", shape.to_string());
  CROSSDOCK_CHECK(tensor.dtype == dtype && tensor.shape == shape, name, " must be ", name_of(dtype),
                  " ", shape.to_string(), ", got ", name_of(tensor.dtype), " ",
                  tensor.shape.to_string());
  CROSSDOCK_CHECK(tensor.device.is_cpu(), name, " must be in host memory");
  CROSSDOCK_CHECK(tensor.data != nullptr || tensor.num_elements() == 0, name, " ",
                  shape.to_string(), " has a null pointer");
}

}  // namespace crossdock
