"""The calls of dispatchers and layers with PyTorch tensors, without autograd: those of the compiled module if there is one.

T tokens, K slots, E experts, R rows, D width; `routing` is ids [T, K] or a map [T, E], and `plan` a tensor (kept.py).
"""
from typing import Any

from . import native, plain
from .plain import dropped, routes_of

_made_by: Any = native.module or plain

#: (x, routing, weights, dispatcher, with_row_weights) -> rows [R, D], row_weights [R] or None, rows per expert, plan
dispatch = _made_by.dispatch
#: (x, routing, weights, dispatcher, with_row_weights, scales) -> the same and row_scales
dispatch_scaled = _made_by.dispatch_scaled
#: (grad_rows, plan, num_tokens) -> grad_x [T, D]
dispatch_backward = _made_by.dispatch_backward
#: (y, weights, routing, plan) -> out [T, D]. The plan has the weights; `weights` is there for autograd
combine = _made_by.combine
#: (y, plan, num_tokens) -> out [T, D]
combine_unweighted = _made_by.combine_unweighted
#: (grad_out, y, routing, plan) -> the gradients of y [R, D] and of the weights, shaped like `routing`
combine_backward = _made_by.combine_backward
#: (grad_out, plan, num_rows) -> the gradient of y [R, D]: every row gets the gradient of its token
combine_unweighted_backward = _made_by.combine_unweighted_backward
#: (values [R] fp32 or fp64, routing, plan) -> a value per route, 0 where there is none, shaped like `routing`
collect_routes = _made_by.collect_routes

#: (x, routing, weights, dispatcher, with_row_weights, scales or None, num_chunks) -> pending and all results
begin_dispatch = _made_by.begin_dispatch
#: (y, plan) -> pending, out [T, D]
begin_combine = _made_by.begin_combine
#: (pending) -> (first_expert, last_expert), or None after the last chunk
next_chunk = _made_by.next_chunk
#: (pending): the results are complete in the current stream
finish = _made_by.finish
#: (pending): ends it without results
drop = _made_by.drop

#: (crossdock.Layer, its handle, rank, lock) -> the layer for the calls below
new_layer = _made_by.new_layer
#: (layer, tensors, num_sequences, total_sequences, jitter_seed, earlier or None, with_saved) -> out [T, D], [5] losses
#: (0 on a GPU), LayerSaved or None. tensors: x, 10 parameters, expert_bias, mask, sequence_ids, forced_ids, token_ids
layer_forward = _made_by.layer_forward if native.module is None else native.layer_forward
#: (layer, tensors, grad_out, saved, wanted [10], grad_losses, delay_dw) -> the gradients of x and the parameters, or None
layer_backward = _made_by.layer_backward if native.module is None else native.layer_backward
#: (layer, x, grad_out, saved, parameters of experts and shared experts [8]) -> their gradients, or None
layer_backward_dw = _made_by.layer_backward_dw if native.module is None else native.layer_backward_dw

__all__ = ["dropped", "routes_of"]
