#include "ops/activation.hpp"

#include <cmath>
#include <numbers>

namespace crossdock::ops {
namespace {

template <typename T>
T sigmoid(T x) {
  return T{1} / (T{1} + std::exp(-x));
}

// A function of one value and its derivative.
template <typename T>
struct Slope {
  T value;
  T derivative;
};

template <typename T>
Slope<T> silu(T x) {
  const T s = sigmoid(x);
  return {x * s, s * (T{1} + x * (T{1} - s))};
}

template <typename T>
Slope<T> gelu(T x) {
  constexpr T kInvSqrt2 = T{1} / std::numbers::sqrt2_v<T>;
  constexpr T kInvSqrt2Pi = kInvSqrt2 * std::numbers::inv_sqrtpi_v<T>;
  const T cdf = T{0.5} * std::erfc(-x * kInvSqrt2);
  return {x * cdf, cdf + x * kInvSqrt2Pi * std::exp(T{-0.5} * x * x)};
}

template <typename T>
Slope<T> gelu_tanh(T x) {
  constexpr T kScale = std::numbers::sqrt2_v<T> * std::numbers::inv_sqrtpi_v<T>;
  constexpr T kCubic = static_cast<T>(0.044715);
  const T t = std::tanh(kScale * (x + kCubic * x * x * x));
  const T inner = kScale * (T{1} + T{3} * kCubic * x * x);
  return {T{0.5} * x * (T{1} + t), T{0.5} * (T{1} + t) + T{0.5} * x * (T{1} - t * t) * inner};
}

template <typename T>
Slope<T> squared_relu(T x) {
  const T r = x < T{0} ? T{0} : x;
  return {r * r, T{2} * r};
}

// gate * sigmoid(1.702 * gate), the gate clamped from above.
template <typename T>
Slope<T> clamped_gate(T x, T limit) {
  constexpr T kAlpha = static_cast<T>(1.702);
  const T gate = x > limit ? limit : x;
  const T s = sigmoid(kAlpha * gate);
  return {gate * s, x > limit ? T{0} : s * (T{1} + kAlpha * gate * (T{1} - s))};
}

// linear + 1, the linear value clamped on both sides.
template <typename T>
Slope<T> clamped_linear(T x, T limit) {
  if (x > limit) return {limit + T{1}, T{0}};
  if (x < -limit) return {T{1} - limit, T{0}};
  return {x + T{1}, T{1}};
}

template <typename T>
Slope<T> identity(T x) {
  return {x, T{1}};
}

// Calls use(gate, linear) with the two functions that a gated activation multiplies, or use(f) with
// the function of a plain one.
template <typename T, typename Use>
void with_functions(const ActivationSpec& spec, const Use& use) {
  const T limit = static_cast<T>(spec.limit);
  switch (spec.kind) {
    case Activation::kSwiglu:
      return use(silu<T>, identity<T>);
    case Activation::kClampedSwiglu:
      return use([limit](T x) { return clamped_gate(x, limit); },
                 [limit](T x) { return clamped_linear(x, limit); });
    case Activation::kGeglu:
      return use(gelu<T>, identity<T>);
    case Activation::kGelu:
      return use(gelu<T>);
    case Activation::kGeluTanh:
      return use(gelu_tanh<T>);
    case Activation::kSquaredRelu:
      return use(squared_relu<T>);
  }
}

// Positions of gate i and linear value i in a row.
struct Places {
  explicit Places(const ActivationSpec& spec)
      : step(spec.interleaved ? 2 : 1), linear_offset(spec.interleaved ? 1 : spec.F) {}
  int64_t gate(int64_t i) const { return i * step; }
  int64_t linear(int64_t i) const { return i * step + linear_offset; }
  int64_t step;
  int64_t linear_offset;
};

template <typename T>
struct ForwardRow {
  const ActivationSpec& spec;
  const T* h;
  T* a;

  template <typename F1>
  void operator()(const F1& f) const {
    for (int64_t i = 0; i < spec.F; ++i) a[i] = f(h[i]).value;
  }
  template <typename F1, typename F2>
  void operator()(const F1& gate, const F2& linear) const {
    const Places at(spec);
    for (int64_t i = 0; i < spec.F; ++i) {
      a[i] = gate(h[at.gate(i)]).value * linear(h[at.linear(i)]).value;
    }
  }
};

template <typename T>
struct BackwardRow {
  const ActivationSpec& spec;
  const T* h;
  const T* grad_a;
  T* grad_h;

  template <typename F1>
  void operator()(const F1& f) const {
    for (int64_t i = 0; i < spec.F; ++i) grad_h[i] = grad_a[i] * f(h[i]).derivative;
  }
  template <typename F1, typename F2>
  void operator()(const F1& gate, const F2& linear) const {
    const Places at(spec);
    for (int64_t i = 0; i < spec.F; ++i) {
      const Slope<T> g = gate(h[at.gate(i)]);
      const Slope<T> l = linear(h[at.linear(i)]);
      grad_h[at.gate(i)] = grad_a[i] * g.derivative * l.value;
      grad_h[at.linear(i)] = grad_a[i] * g.value * l.derivative;
    }
  }
};

}  // namespace

template <typename T>
void activate(const ActivationSpec& spec, const T* h, T* a) {
  with_functions<T>(spec, ForwardRow<T>{spec, h, a});
}

template <typename T>
void activate_backward(const ActivationSpec& spec, const T* h, const T* grad_a, T* grad_h) {
  with_functions<T>(spec, BackwardRow<T>{spec, h, grad_a, grad_h});
}

template void activate<float>(const ActivationSpec&, const float*, float*);
template void activate<double>(const ActivationSpec&, const double*, double*);
template void activate_backward<float>(const ActivationSpec&, const float*, const float*, float*);
template void activate_backward<double>(const ActivationSpec&, const double*, const double*,
                                        double*);

}  // namespace crossdock::ops
