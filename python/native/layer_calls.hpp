// The calls of a whole layer, from tensors to tensors (python/crossdock/torch/whole_layer.py).
#pragma once

#include "call.hpp"

namespace torch_calls {

using Function = PyObject*(PyObject* module, PyObject* const* args, Py_ssize_t num_args);

// (layer, handle, rank, lock) -> the layer for the calls below, which keeps the first argument
Function new_layer;
// (layer, tensors, num_sequences, total_sequences, jitter_seed, earlier or None, with_saved)
// -> out [T, D], the 5 losses, the handle of what is saved or None, the fields of losses on a GPU
//
// tensors: x, gate, gate_bias, w1, w2, b1, b2, those of the shared experts, expert_bias, mask,
//          sequence_ids, forced_ids, token_ids; None: not given
Function layer_forward;
// (layer, tensors, grad_out, saved, wanted [10], grad_losses, delay_dw)
// -> the gradients of x and of the parameters, which come after x in `tensors`; None: not made
Function layer_backward;
// (layer, x, grad_out, saved, parameters of experts and shared experts [8])
// -> their gradients; None where there is no parameter
Function layer_backward_dw;

}  // namespace torch_calls
