// The calls of crossdock.torch for plain tensors in host memory, in one step from tensors to
// tensors. For any other tensors a function returns None without side effects, and
// _direct_calls.py and torch/calls.py make the same call in Python.
//
// Tensors are read through torch's DLPack exchange functions, so neither torch's headers nor its
// version matter. Of Python, only the stable ABI is used.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "crossdock/crossdock.h"
#include "dlpack.hpp"

namespace {

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

/// Set once, by `prepare`.
struct Torch {
  const DLPackExchangeAPI* exchange = nullptr;
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* fail = nullptr;      // fail(rank): raises the library's last error
  PyObject* as_int64 = nullptr;  // {"dtype": torch.int64}
  PyObject* as_fp32 = nullptr;
} torch;

/// A struct of the C API with its size set.
template <typename Struct>
Struct sized() {
  Struct made{};
  made.struct_size = sizeof made;
  return made;
}

/// Makes a call without the GIL. If the interpreter is ending, it ends a thread that requests the
/// GIL (until Python 3.13). Unwinding would then release Python objects here, so the thread is held
/// until the process exits.
template <typename Call>
crossdock_status run(const Call& call) {
  PyThreadState* const state = PyEval_SaveThread();
  const crossdock_status status = call();
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {
    while (true) pause();
  }
  return status;
}

int32_t dtype_of(DLDataType dtype) {
  if (dtype.lanes != 1) return -1;
  switch (dtype.code << 8 | dtype.bits) {
    case kDLFloat << 8 | 64:
      return CROSSDOCK_F64;
    case kDLFloat << 8 | 32:
      return CROSSDOCK_F32;
    case kDLFloat << 8 | 16:
      return CROSSDOCK_F16;
    case kDLBfloat << 8 | 16:
      return CROSSDOCK_BF16;
    case kDLInt << 8 | 64:
      return CROSSDOCK_I64;
    case kDLInt << 8 | 32:
      return CROSSDOCK_I32;
    case kDLBool << 8 | 8:
      return CROSSDOCK_BOOL;
    default:
      return -1;
  }
}

bool is_contiguous(const DLTensor& tensor) {
  int64_t expected = 1;
  bool is_dense = true;
  for (int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
    is_dense = is_dense && (tensor.shape[dim] == 1 || tensor.strides[dim] == expected);
    expected *= tensor.shape[dim];
  }
  return is_dense || expected == 0;  // without values, strides mean nothing
}

/// Describes a plain tensor: contiguous, in host memory, of a dtype that the library has. Returns
/// false for any other object.
bool describe(PyObject* object, crossdock_tensor& described) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != torch.tensor_type && type != torch.parameter_type) return false;
  DLTensor tensor{};
  if (torch.exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const int32_t dtype = dtype_of(tensor.dtype);
  if (tensor.device.device_type != kDLCPU || dtype < 0 || tensor.ndim < 1 || tensor.ndim > 2 ||
      !is_contiguous(tensor)) {
    return false;
  }
  described = {};
  described.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  for (int32_t dim = 0; dim < tensor.ndim; ++dim) described.shape[dim] = tensor.shape[dim];
  described.num_dims = tensor.ndim;
  described.dtype = dtype;
  return true;
}

/// A new tensor for a result. Null if it cannot be made or is not plain: the Python code then makes
/// the call and reports the problem.
Owned new_tensor(PyObject* like, std::initializer_list<int64_t> shape, PyObject* dtype,
                 crossdock_tensor& described) {
  const Owned sizes(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  Py_ssize_t dim = 0;
  for (const int64_t size : shape) {
    if (sizes) PyTuple_SetItem(sizes.get(), dim++, PyLong_FromLongLong(size));
  }
  const Owned method(PyObject_GetAttrString(like, "new_empty"));
  Owned made(sizes && method ? PyObject_Call(method.get(), sizes.get(), dtype) : nullptr);
  if (made && describe(made.get(), described)) return made;
  PyErr_Clear();
  return nullptr;
}

/// Raises the library's last error.
PyObject* fail(PyObject* rank) {
  Py_XDECREF(PyObject_CallFunctionObjArgs(torch.fail, rank, nullptr));
  return nullptr;
}

/// The handle in a Python int. None, the handle of a closed object, becomes null, which the library
/// refuses.
template <typename T>
T* pointer_in(PyObject* number) {
  return number == Py_None ? nullptr : static_cast<T*>(PyLong_AsVoidPtr(number));
}

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// (dispatcher, rank, x, routing, weights, with_row_weights, num_local_experts, most_values)
// -> rows, row_weights, rows_per_expert, plan, num_tokens, capacity_rows, top_k
//
// rows and row_weights are None if they cannot be made here or would have more than most_values
// values: the plan has been made, and the caller makes the dispatch.
PyObject* send(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  auto* dispatcher = pointer_in<crossdock_dispatcher>(args[0]);
  PyObject* rank = args[1];
  const bool with_row_weights = args[5] == Py_True;
  auto routing = sized<crossdock_routing>();
  auto dispatch = sized<crossdock_dispatch_args>();
  crossdock_tensor routes{}, counts{};
  if (!describe(args[2], dispatch.x) || !describe(args[3], routes) ||
      !describe(args[4], routing.weights) || dispatch.x.num_dims != 2 ||
      (routing.weights.dtype == CROSSDOCK_F64) != (dispatch.x.dtype == CROSSDOCK_F64)) {
    return none();
  }
  (routes.dtype == CROSSDOCK_BOOL ? routing.map : routing.expert_ids) = routes;
  const Owned rows_per_expert =
      new_tensor(args[3], {PyLong_AsLongLong(args[6])}, torch.as_int64, counts);
  if (!rows_per_expert) return none();
  crossdock_plan* plan = nullptr;
  auto info = sized<crossdock_plan_info>();
  if (run([&] {
        return crossdock_plan_create_described(dispatcher, &routing, &info,
                                               static_cast<int64_t*>(counts.data), &plan);
      }) != CROSSDOCK_OK) {
    return fail(rank);
  }
  const int64_t D = dispatch.x.shape[1];
  auto result = sized<crossdock_dispatch_result>();
  Owned rows, row_weights;
  if (info.capacity_rows * D <= PyLong_AsLongLong(args[7])) {
    rows = new_tensor(args[2], {info.capacity_rows, D}, nullptr, result.rows.tensor);
  }
  if (rows && with_row_weights) {
    dispatch.with_row_weights = 1;
    PyObject* dtype = dispatch.x.dtype == CROSSDOCK_F64 ? nullptr : torch.as_fp32;
    row_weights = new_tensor(args[2], {info.capacity_rows}, dtype, result.row_weights.tensor);
    if (!row_weights) rows.reset();
  }
  if (rows && run([&] { return crossdock_dispatch(dispatcher, plan, &dispatch, &result); }) !=
                  CROSSDOCK_OK) {
    fail(rank);
    crossdock_plan_destroy(plan);
    return nullptr;
  }
  PyObject* sent = Py_BuildValue("OOONLLL", rows ? rows.get() : Py_None,
                                 row_weights ? row_weights.get() : Py_None, rows_per_expert.get(),
                                 PyLong_FromVoidPtr(plan), info.num_tokens, info.capacity_rows,
                                 info.weights.shape[1]);
  if (sent == nullptr) crossdock_plan_destroy(plan);
  return sent;
}

using Move = crossdock_status(crossdock_dispatcher*, const crossdock_plan*, const crossdock_tensor*,
                              crossdock_output*);

// (dispatcher, rank, plan, source, num_tokens, width) -> [num_tokens, width]
template <Move* kMove>
PyObject* move(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  auto* dispatcher = pointer_in<crossdock_dispatcher>(args[0]);
  const auto* plan = pointer_in<crossdock_plan>(args[2]);
  crossdock_tensor source{};
  crossdock_output target{};
  if (!describe(args[3], source)) return none();
  Owned made = new_tensor(args[3], {PyLong_AsLongLong(args[4]), PyLong_AsLongLong(args[5])},
                          nullptr, target.tensor);
  if (!made) return none();
  if (run([&] { return kMove(dispatcher, plan, &source, &target); }) != CROSSDOCK_OK) {
    return fail(args[1]);
  }
  return made.release();
}

// (dispatcher, rank, plan, grad_out, y, top_k, most_values)
// -> the gradients of y [R, D] and of weights [T, K]
PyObject* combine_backward(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  auto* dispatcher = pointer_in<crossdock_dispatcher>(args[0]);
  const auto* plan = pointer_in<crossdock_plan>(args[2]);
  auto given = sized<crossdock_combine_backward_args>();
  if (!describe(args[3], given.grad_out) || !describe(args[4], given.y) ||
      given.grad_out.num_dims != 2 || given.y.num_dims != 2 ||
      given.y.shape[0] * given.y.shape[1] > PyLong_AsLongLong(args[6])) {
    return none();
  }
  auto result = sized<crossdock_combine_backward_result>();
  const Owned grad_rows =
      new_tensor(args[4], {given.y.shape[0], given.y.shape[1]}, nullptr, result.grad_rows.tensor);
  PyObject* dtype =
      given.y.dtype == CROSSDOCK_F64 || given.y.dtype == CROSSDOCK_F32 ? nullptr : torch.as_fp32;
  const Owned grad_weights =
      new_tensor(args[4], {given.grad_out.shape[0], PyLong_AsLongLong(args[5])}, dtype,
                 result.grad_weights.tensor);
  if (!grad_rows || !grad_weights) return none();
  if (run([&] { return crossdock_combine_backward(dispatcher, plan, &given, &result); }) !=
      CROSSDOCK_OK) {
    return fail(args[1]);
  }
  return PyTuple_Pack(2, grad_rows.get(), grad_weights.get());
}

// (exchange functions, Tensor, Parameter, fail, {"dtype": int64}, {"dtype": float32})
PyObject* prepare(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  const auto* exchange =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(args[0], "dlpack_exchange_api"));
  if (exchange == nullptr) PyErr_Clear();
  const bool is_known = exchange != nullptr && exchange->header.version.major == 1 &&
                        exchange->dltensor_from_py_object_no_sync != nullptr;
  if (is_known) {
    for (int i = 1; i < 6; ++i) Py_INCREF(args[i]);
    torch = {exchange, args[1], args[2], args[3], args[4], args[5]};
  }
  return PyBool_FromLong(is_known ? 1 : 0);
}

PyMethodDef method(const char* name,
                   PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

}  // namespace

extern "C" PyMODINIT_FUNC PyInit__torch_calls() {
  static PyMethodDef methods[] = {
      method("prepare", prepare),
      method("send", send),
      method("dispatch_backward", move<crossdock_dispatch_backward>),
      method("combine", move<crossdock_combine>),
      method("combine_unweighted", move<crossdock_combine_unweighted>),
      method("combine_backward", combine_backward),
      method("collect_routes", move<crossdock_collect_routes>),
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "_torch_calls",
                               nullptr,
                               -1,
                               methods,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
