#pragma once

#include "crossdock/tensor.hpp"
#include "ops/activation.hpp"

namespace crossdock::ops {

// Activations of ragged rows on a GPU, in fp32, bf16 or fp16, computed in fp32. All tensors and
// segments are on one device, where work is queued in `stream`. R may exceed the rows of the
// segments, which are counted on the device. Only rows of segments are read and written. A row's
// bits depend on that row alone.

/// activation[r] = act(hidden[r]), times row_weights[r] if given, rounded once.
struct ActivateArgs {
  ActivationSpec spec;
  ConstTensorView hidden;       // [R, 2F or F]
  ConstTensorView row_weights;  // [R] fp32, optional
  Segments segments;
  TensorView activation;  // out [R, F]
};

void activate_on_device(const ActivateArgs& args, Stream stream);

/// With a = act(hidden[r]), p = row_weights[r], g = grad_y[r] and u = W2^T g:
/// grad_hidden[r] = p u act'(hidden[r]), weighted_activation[r] = p a, each rounded once;
/// grad_row_weights[r] = <a, u> + <b2[e], g>, summed in an order that depends on F and D alone.
struct ActivateBackwardArgs {
  ActivationSpec spec;
  ConstTensorView hidden;           // [R, 2F or F]
  ConstTensorView row_weights;      // [R] fp32, optional: 1
  ConstTensorView grad_activation;  // [R, F]: u, not multiplied by the row's weight
  ConstTensorView grad_y;           // [R, D]; with b2 only
  ConstTensorView b2;               // [E_local, D], optional; for grad_row_weights
  Segments segments;
  TensorView grad_hidden;          // out [R, 2F or F]; may be the memory of `hidden`
  TensorView weighted_activation;  // out [R, F], optional; may be the memory of `grad_activation`
  TensorView grad_row_weights;     // out [R] fp32, optional
};

void activate_backward_on_device(const ActivateBackwardArgs& args, Stream stream);

/// Call it before ranks that share a GPU wait for each other.
void load_device_activation(Activation kind, DType dtype, Device device);

}  // namespace crossdock::ops
