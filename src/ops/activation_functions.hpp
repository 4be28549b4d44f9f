#pragma once

#include <cmath>
#include <numbers>
#include <type_traits>

#include "crossdock/dtype.hpp"
#include "crossdock/experts.hpp"

namespace crossdock::ops {

// The functions that activations are made of, for the CPU and for GPUs.

/// The value of a function and its derivative.
template <typename T>
struct Slope {
  T value;
  T derivative;
};

/// On a GPU the error is a few units in the last place: an exact result would take as many
/// instructions as the rest of an activation.
template <typename T>
CROSSDOCK_HOST_DEVICE inline T sigmoid(T x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, 1.0f + __expf(-x));
#else
  return T{1} / (T{1} + std::exp(-x));
#endif
}

template <typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> silu(T x) {
  const T s = sigmoid(x);
  return {x * s, s * (T{1} + x * (T{1} - s))};
}

template <typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> gelu(T x) {
  constexpr T kInvSqrt2 = T{1} / std::numbers::sqrt2_v<T>;
  constexpr T kInvSqrt2Pi = kInvSqrt2 * std::numbers::inv_sqrtpi_v<T>;
  const T cdf = T{0.5} * std::erfc(-x * kInvSqrt2);
  return {x * cdf, cdf + x * kInvSqrt2Pi * std::exp(T{-0.5} * x * x)};
}

template <typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> gelu_tanh(T x) {
  constexpr T kScale = std::numbers::sqrt2_v<T> * std::numbers::inv_sqrtpi_v<T>;
  constexpr T kCubic = static_cast<T>(0.044715);
  const T t = std::tanh(kScale * (x + kCubic * x * x * x));
  const T inner = kScale * (T{1} + T{3} * kCubic * x * x);
  return {T{0.5} * x * (T{1} + t), T{0.5} * (T{1} + t) + T{0.5} * x * (T{1} - t * t) * inner};
}

template <typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> squared_relu(T x) {
  const T r = x < T{0} ? T{0} : x;
  return {r * r, T{2} * r};
}

/// silu, the gate clamped from above.
template <typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> limited_silu(T x, T limit) {
  const Slope<T> result = silu(x > limit ? limit : x);
  return {result.value, x > limit ? T{0} : result.derivative};
}

/// Clamped on both sides.
template <typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> limited_linear(T x, T limit) {
  const bool is_clamped = x > limit || x < -limit;
  return {x > limit ? limit : x < -limit ? -limit : x, is_clamped ? T{0} : T{1}};
}

/// gate * sigmoid(1.702 * gate), the gate clamped from above.
template <typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> clamped_gate(T x, T limit) {
  constexpr T kAlpha = static_cast<T>(1.702);
  const T gate = x > limit ? limit : x;
  const T s = sigmoid(kAlpha * gate);
  return {gate * s, x > limit ? T{0} : s * (T{1} + kAlpha * gate * (T{1} - s))};
}

/// linear + 1, the linear value clamped on both sides.
template <typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> clamped_linear(T x, T limit) {
  const Slope<T> clamped = limited_linear(x, limit);
  return {clamped.value + T{1}, clamped.derivative};
}

/// The function of the gate in a gated activation, or of the only value in a plain one.
template <Activation kKind, typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> gate_function(T x, [[maybe_unused]] T limit) {
  if constexpr (kKind == Activation::kSwiglu) {
    return silu(x);
  } else if constexpr (kKind == Activation::kClampedSwiglu) {
    return clamped_gate(x, limit);
  } else if constexpr (kKind == Activation::kGeluTanh || kKind == Activation::kGegluTanh) {
    return gelu_tanh(x);
  } else if constexpr (kKind == Activation::kSquaredRelu) {
    return squared_relu(x);
  } else if constexpr (kKind == Activation::kLimitedSwiglu) {
    return limited_silu(x, limit);
  } else {
    static_assert(kKind == Activation::kGeglu || kKind == Activation::kGelu);
    return gelu(x);
  }
}

/// The function of the linear value in a gated activation; its result multiplies the gate's.
template <Activation kKind, typename T>
CROSSDOCK_HOST_DEVICE inline Slope<T> linear_function(T x, [[maybe_unused]] T limit) {
  static_assert(is_gated(kKind));
  if constexpr (kKind == Activation::kClampedSwiglu) {
    return clamped_linear(x, limit);
  } else if constexpr (kKind == Activation::kLimitedSwiglu) {
    return limited_linear(x, limit);
  } else {
    return {x, T{1}};
  }
}

/// Calls use(std::integral_constant<Activation, kind>()).
template <typename Use>
void with_activation(Activation kind, const Use& use) {
  switch (kind) {
    case Activation::kSwiglu:
      return use(std::integral_constant<Activation, Activation::kSwiglu>());
    case Activation::kClampedSwiglu:
      return use(std::integral_constant<Activation, Activation::kClampedSwiglu>());
    case Activation::kGeglu:
      return use(std::integral_constant<Activation, Activation::kGeglu>());
    case Activation::kGelu:
      return use(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kGeluTanh:
      return use(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kSquaredRelu:
      return use(std::integral_constant<Activation, Activation::kSquaredRelu>());
    case Activation::kGegluTanh:
      return use(std::integral_constant<Activation, Activation::kGegluTanh>());
    case Activation::kLimitedSwiglu:
      return use(std::integral_constant<Activation, Activation::kLimitedSwiglu>());
  }
}

}  // namespace crossdock::ops
