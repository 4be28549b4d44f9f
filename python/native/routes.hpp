// Dispatchers by their numbers, plans, and tensors that own Python objects.
#pragma once

#include "call.hpp"

namespace torch_calls {

/// The dispatcher with this number. Null if there is none, with a Python error set.
Caller* dispatcher_of(PyObject* number);

// (number, core, handle, rank, lock, number of local experts, width)
PyObject* add_dispatcher(PyObject* module, PyObject* const* args, Py_ssize_t num_args);
// (number): its calls fail from now on
PyObject* close_dispatcher(PyObject* module, PyObject* const* args, Py_ssize_t num_args);
// (number): there are no calls any more
PyObject* remove_dispatcher(PyObject* module, PyObject* const* args, Py_ssize_t num_args);

/// A plan with its dispatcher, as a Python object.
struct Routes {
  PyObject ob_base;
  crossdock_plan* plan;
  Caller* dispatcher;
  PyObject* core;  // owned; it keeps the dispatcher
  int64_t num_tokens;
  int64_t capacity_rows;
  int64_t top_k;
};

/// Makes the type. Called once. False: a Python error is set.
bool make_routes_type(PyObject* module);
/// A plan that is not made yet.
Owned new_routes(Caller& dispatcher);

inline Routes& routes_in(const Owned& object) {
  return *reinterpret_cast<Routes*>(object.get());
}

// ---- Tensors that own objects ----
//
// Operators pass tensors only, and autograd, checkpointing and compiled graphs decide how long
// these live. So an object is an int64 tensor [1] on the CPU with the object's number, whose memory
// owns it: it is freed with the last tensor that shares the memory. Copies of the tensor name the
// object as long as it lives.

/// A tensor that owns the object.
Owned tensor_owning(PyObject* object);
/// The object of a tensor; null if there is none, without a Python error.
PyObject* owned_by(PyObject* tensor);
/// A tensor of `memory`, which belongs to the object: [size] int64 on the GPU with this index.
Owned view_on_device(PyObject* object, const int64_t* memory, int64_t size, int32_t device_index);

/// The plan for which a tensor stands. Null: a Python error is set.
Owned routes_of(PyObject* tensor);

// (object) -> tensor
PyObject* tensor_owning(PyObject* module, PyObject* const* args, Py_ssize_t num_args);
// (tensor) -> object or None
PyObject* owned_by(PyObject* module, PyObject* const* args, Py_ssize_t num_args);

}  // namespace torch_calls
