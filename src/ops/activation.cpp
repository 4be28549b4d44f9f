#include "ops/activation.hpp"

#include "ops/activation_functions.hpp"

namespace crossdock::ops {
namespace {

// Positions of gate i and linear value i in a row.
struct Places {
  explicit Places(const ActivationSpec& spec)
      : step(spec.interleaved ? 2 : 1), linear_offset(spec.interleaved ? 1 : spec.F) {}
  int64_t gate(int64_t i) const { return i * step; }
  int64_t linear(int64_t i) const { return i * step + linear_offset; }
  int64_t step;
  int64_t linear_offset;
};

template <Activation kKind, typename T>
void forward_row(const ActivationSpec& spec, const T* h, T* a) {
  const T limit = static_cast<T>(spec.limit);
  const Places at(spec);
  for (int64_t i = 0; i < spec.F; ++i) {
    if constexpr (is_gated(kKind)) {
      a[i] = gate_function<kKind>(h[at.gate(i)], limit).value *
             linear_function<kKind>(h[at.linear(i)], limit).value;
    } else {
      a[i] = gate_function<kKind>(h[i], limit).value;
    }
  }
}

template <Activation kKind, typename T>
void backward_row(const ActivationSpec& spec, const T* h, const T* grad_a, T* grad_h) {
  const T limit = static_cast<T>(spec.limit);
  const Places at(spec);
  for (int64_t i = 0; i < spec.F; ++i) {
    if constexpr (is_gated(kKind)) {
      const Slope<T> gate = gate_function<kKind>(h[at.gate(i)], limit);
      const Slope<T> linear = linear_function<kKind>(h[at.linear(i)], limit);
      grad_h[at.gate(i)] = grad_a[i] * gate.derivative * linear.value;
      grad_h[at.linear(i)] = grad_a[i] * gate.value * linear.derivative;
    } else {
      grad_h[i] = grad_a[i] * gate_function<kKind>(h[i], limit).derivative;
    }
  }
}

}  // namespace

template <typename T>
void activate(const ActivationSpec& spec, const T* h, T* a) {
  with_activation(spec.kind, [&](auto kind) { forward_row<decltype(kind)::value>(spec, h, a); });
}

template <typename T>
void activate_backward(const ActivationSpec& spec, const T* h, const T* grad_a, T* grad_h) {
  with_activation(spec.kind,
                  [&](auto kind) { backward_row<decltype(kind)::value>(spec, h, grad_a, grad_h); });
}

template void activate<float>(const ActivationSpec&, const float*, float*);
template void activate<double>(const ActivationSpec&, const double*, double*);
template void activate_backward<float>(const ActivationSpec&, const float*, const float*, float*);
template void activate_backward<double>(const ActivationSpec&, const double*, const double*,
                                        double*);

}  // namespace crossdock::ops
