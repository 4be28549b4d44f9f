#pragma once

#include <string>

#include "crossdock/tensor.hpp"

namespace crossdock {

// Checks of what a caller gave; each throws Error(kInvalidArgument) that names the tensor.

/// "[3, 4] fp32", or "nothing".
std::string describe(const ConstTensorView& tensor);

/// Host memory, and some where there are elements.
void check_memory(const char* name, const ConstTensorView& tensor);

/// The shape, and memory for it.
void check_tensor(const char* name, const ConstTensorView& tensor, const Shape& shape);

/// An output of the caller's: also the dtype.
void check_output(const char* name, const TensorView& tensor, DType dtype, const Shape& shape);

}  // namespace crossdock
