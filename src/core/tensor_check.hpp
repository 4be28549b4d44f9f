#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "crossdock/tensor.hpp"

namespace crossdock {

// Checks of what a caller gave; each throws Error(kInvalidArgument). `name` is the caller's word
// for the tensor.

/// "[3, 4] fp32", or "nothing".
std::string describe(const ConstTensorView& tensor);

/// Host memory, and some where there are elements.
void check_memory(std::string_view name, const ConstTensorView& tensor);

/// The shape, and memory for it.
void check_tensor(std::string_view name, const ConstTensorView& tensor, const Shape& shape);

/// Also the dtype.
void check_tensor(std::string_view name, const ConstTensorView& tensor, DType dtype,
                  const Shape& shape);

struct NamedTensor {
  std::string_view name;
  ConstTensorView tensor;  // may be one that is not given
};

/// No output shares a byte with an input or with another output, wherever they are.
void check_no_overlap(const std::vector<NamedTensor>& outputs,
                      const std::vector<NamedTensor>& inputs);

}  // namespace crossdock
