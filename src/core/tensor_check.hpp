#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "crossdock/tensor.hpp"

namespace crossdock {

// Checks of the caller's tensors; each throws Error(kInvalidArgument). `name` is the caller's name
// for the tensor.

/// "[3, 4] fp32", or "nothing".
std::string describe(const ConstTensorView& tensor);

/// "in host memory", or "on GPU 1".
std::string describe(Device device);

/// The tensor must not be null, unless it is empty.
void check_not_null(std::string_view name, const ConstTensorView& tensor);

/// The tensor must be in host memory and, unless empty, not null.
void check_memory(std::string_view name, const ConstTensorView& tensor);

/// The tensor must be on `device` and, unless empty, not null.
void check_memory(std::string_view name, const ConstTensorView& tensor, Device device);

/// The tensor must also have this shape.
void check_tensor(std::string_view name, const ConstTensorView& tensor, const Shape& shape);

/// The tensor must also have this dtype.
void check_tensor(std::string_view name, const ConstTensorView& tensor, DType dtype,
                  const Shape& shape);

/// The tensor must be on `device` and have this dtype and shape.
void check_tensor(std::string_view name, const ConstTensorView& tensor, Device device, DType dtype,
                  const Shape& shape);

struct NamedTensor {
  std::string_view name;
  ConstTensorView tensor;  // may be unset
};

/// No output may share memory with an input or with another output.
void check_no_overlap(const std::vector<NamedTensor>& outputs,
                      const std::vector<NamedTensor>& inputs);

/// No two of the tensors may share memory. Scales to many tensors.
void check_apart(std::vector<NamedTensor> tensors);

}  // namespace crossdock
