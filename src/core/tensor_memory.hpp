#pragma once

#include <cstdint>

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

// Memory as elements of type U; null if no tensor is given. REQUIRES: dtype and size have been
// checked.

template <typename U>
const U* pointer(const ConstTensorView& tensor) {
  return static_cast<const U*>(tensor.data);
}

template <typename U>
U* pointer(const TensorView& tensor) {
  return static_cast<U*>(tensor.data);
}

template <typename U>
U* pointer(const Buffer& buffer) {
  return reinterpret_cast<U*>(buffer.data());
}

template <typename U>
constexpr int64_t bytes_of(int64_t count) {
  return count * static_cast<int64_t>(sizeof(U));
}

}  // namespace crossdock
