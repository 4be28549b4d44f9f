#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>

#include "crossdock/tensor.hpp"

namespace crossdock {

/// Larger than any memory; a few such sizes can be added and rounded up without overflow.
inline constexpr int64_t kMaxBytes = int64_t{1} << 60;

/// The largest width or inner width; a larger one is assumed to be a mistake.
inline constexpr int64_t kMaxWidth = std::numeric_limits<int32_t>::max();

/// Pools hand out memory in multiples of this size.
inline constexpr int64_t kPageBytes = 4096;

/// The smallest multiple of `multiple` that is at least `value`. REQUIRES: value >= 0.
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// A position as containers take it. REQUIRES: i >= 0.
constexpr size_t index(int64_t i) {
  return static_cast<size_t>(i);
}

/// The product, if it is at most `limit`. REQUIRES: no factor is negative.
std::optional<int64_t> product_within(int64_t limit, std::initializer_list<int64_t> factors);

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
