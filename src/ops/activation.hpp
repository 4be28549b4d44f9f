#pragma once

#include <cstdint>

#include "crossdock/experts.hpp"

namespace crossdock::ops {

/// What an activation needs to know beside its input. Of a gated one the input row h holds F gates
/// and then F linear values, or gate and linear in turn (`interleaved`); of a plain one F values.
struct ActivationSpec {
  Activation kind = Activation::kSwiglu;
  bool interleaved = false;
  double limit = 7.0;  // of clamped_swiglu
  int64_t F = 0;

  int64_t input_width() const { return is_gated(kind) ? 2 * F : F; }
};

/// One row: h [2F or F] -> a [F].
template <typename T>
void activate(const ActivationSpec& spec, const T* h, T* a);

/// One row: grad_a [F] -> grad_h [2F or F], which may be h itself. Where clamped_swiglu clamps, the
/// gradient is 0; on the limit itself it passes.
template <typename T>
void activate_backward(const ActivationSpec& spec, const T* h, const T* grad_a, T* grad_h);

extern template void activate<float>(const ActivationSpec&, const float*, float*);
extern template void activate<double>(const ActivationSpec&, const double*, double*);
extern template void activate_backward<float>(const ActivationSpec&, const float*, const float*,
                                              float*);
extern template void activate_backward<double>(const ActivationSpec&, const double*, const double*,
                                               double*);

}  // namespace crossdock::ops
