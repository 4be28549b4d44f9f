#pragma once

#include <cstdint>

#include "crossdock/experts.hpp"

namespace crossdock::ops {

/// An activation and the layout of its input row h: for a gated activation F gates and then F
/// linear values, or gates and linear values interleaved; for a plain one F values.
struct ActivationSpec {
  Activation kind = Activation::kSwiglu;
  bool interleaved = false;
  double limit = 7.0;  // for clamped_swiglu and limited_swiglu
  int64_t F = 0;
};

/// One row: h [2F or F] -> a [F].
template <typename T>
void activate(const ActivationSpec& spec, const T* h, T* a);

/// One row: grad_a [F] -> grad_h [2F or F], which may be h itself. Where a value is clamped, the
/// gradient is 0; at the limit itself it passes through.
template <typename T>
void activate_backward(const ActivationSpec& spec, const T* h, const T* grad_a, T* grad_h);

extern template void activate<float>(const ActivationSpec&, const float*, float*);
extern template void activate<double>(const ActivationSpec&, const double*, double*);
extern template void activate_backward<float>(const ActivationSpec&, const float*, const float*,
                                              float*);
extern template void activate_backward<double>(const ActivationSpec&, const double*, const double*,
                                               double*);

}  // namespace crossdock::ops
