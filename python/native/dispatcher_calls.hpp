// The calls of a dispatcher, from tensors to tensors. Plans are tensors, see routes.hpp.
//
// T tokens, K slots, E experts, R rows, D width; routing is ids [T, K] or a map [T, E].
#pragma once

#include "routes.hpp"

namespace torch_calls {

using Function = PyObject*(PyObject* module, PyObject* const* args, Py_ssize_t num_args);

// (x, routing, weights, dispatcher, with_row_weights)
// -> rows [R, D], row_weights [R] or None, rows_per_expert [E_local], plan
Function dispatch;
// (x, routing, weights, dispatcher, with_row_weights, scales) -> the same and row_scales
Function dispatch_scaled;
// (grad_rows, plan, num_tokens) -> grad_x [T, D]
Function dispatch_backward;
// (y, weights, routing, plan) -> out [T, D]
Function combine;
// (y, plan, num_tokens) -> out [T, D]
Function combine_unweighted;
// (grad_out, y, routing, plan) -> the gradients of y [R, D] and of the weights, shaped like routing
Function combine_backward;
// (grad_out, plan, num_rows) -> the gradient of y [R, D]
Function combine_unweighted_backward;
// (values [R], routing, plan) -> shaped like routing
Function collect_routes;

// (x, routing, weights, dispatcher, with_row_weights, scales or None, num_chunks)
// -> pending, rows, row_weights or None, rows_per_expert, plan, row_scales or None
Function begin_dispatch;
// (y, plan) -> pending, out [T, D]
Function begin_combine;
// (pending) -> (first_expert, last_expert), or None after the last chunk
Function next_chunk;
// (pending): its results are complete in torch's current stream
Function finish;
// (pending): ends it without results
Function drop;

}  // namespace torch_calls
