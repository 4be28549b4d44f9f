#pragma once

#include "crossdock/tensor.hpp"

namespace crossdock {

/// The start of a buffer as a tensor that shares the ownership of its memory.
inline OwnedTensor owned_tensor(const Buffer& buffer, DType dtype, const Shape& shape) {
  return {.view = buffer.view(dtype, shape), .owner = buffer.owner()};
}

/// A tensor in host memory, contents unspecified, not from a pool.
inline OwnedTensor new_host_tensor(DType dtype, const Shape& shape) {
  return owned_tensor(Buffer(shape.num_elements() * size_of(dtype)), dtype, shape);
}

}  // namespace crossdock
