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

/// Marks a function that is compiled once per instruction set; the best one for the CPU is chosen
/// when the program is loaded. The bits must not depend on the choice: write std::fma explicitly,
/// and let nothing depend on the vector width. With sanitizers, which do not support this, and with
/// other compilers or CPUs, the function is compiled once.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__CUDACC__)
#define CROSSDOCK_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CROSSDOCK_SIMD
#endif

/// For templates called by such a function: they are inlined into each version.
#define CROSSDOCK_INLINE inline __attribute__((always_inline))
