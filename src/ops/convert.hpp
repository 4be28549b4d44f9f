#pragma once

#include <cstdint>

#include "crossdock/dtype.hpp"

namespace crossdock::ops {

/// Type of sums over values of type T: double for double, otherwise float.
template <typename T>
struct ComputeType {
  using Type = float;
};
template <>
struct ComputeType<double> {
  using Type = double;
};
template <typename T>
using Compute = typename ComputeType<T>::Type;

inline double widen(double value) {
  return value;
}
template <typename T>
float widen(T value) {
  return to_float(value);
}

/// Rounds to T once, to nearest even.
template <typename T>
T narrow(Compute<T> value) {
  if constexpr (sizeof(T) == sizeof(Compute<T>)) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

template <typename T>
void widen_row(const T* from, int64_t count, Compute<T>* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

template <typename T>
void narrow_row(const Compute<T>* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(from[i]);
}

}  // namespace crossdock::ops
