// The calls of crossdock.torch, in one step from tensors to tensors
// (python/crossdock/torch/native.py).
//
// Tensors are read and made through torch's DLPack exchange functions, so neither torch's headers
// nor its version matter. Of Python, only the stable ABI is used.
#include "dispatcher_calls.hpp"
#include "layer_calls.hpp"

namespace torch_calls {
namespace {

// (exchange functions, fail, refuse, caught, raise_caught, is_capturing, by_map,
//  {"dtype": int64}, {"dtype": float32}, {"dtype": float64})
PyObject* prepare(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  const auto* exchange =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(args[0], "dlpack_exchange_api"));
  if (exchange == nullptr) PyErr_Clear();
  const bool is_known = exchange != nullptr && exchange->header.version.major == 1 &&
                        exchange->dltensor_from_py_object_no_sync != nullptr;
  if (is_known) {
    for (int i = 1; i < 10; ++i) Py_INCREF(args[i]);
    torch = {exchange,
             args[1],
             args[2],
             args[3],
             args[4],
             args[5],
             args[6],
             args[7],
             args[8],
             args[9],
             PyUnicode_InternFromString("new_empty"),
             PyUnicode_InternFromString("shape")};
  }
  return PyBool_FromLong(is_known ? 1 : 0);
}

PyMethodDef method(const char* name, Function* function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

}  // namespace
}  // namespace torch_calls

extern "C" PyMODINIT_FUNC PyInit__torch_calls() {
  using namespace torch_calls;
  static PyMethodDef methods[] = {
      method("prepare", prepare),
      method("add_dispatcher", add_dispatcher),
      method("close_dispatcher", close_dispatcher),
      method("remove_dispatcher", remove_dispatcher),
      method("tensor_owning", tensor_owning),
      method("owned_by", owned_by),
      method("dispatch", dispatch),
      method("dispatch_scaled", dispatch_scaled),
      method("dispatch_backward", dispatch_backward),
      method("combine", combine),
      method("combine_unweighted", combine_unweighted),
      method("combine_backward", combine_backward),
      method("combine_unweighted_backward", combine_unweighted_backward),
      method("collect_routes", collect_routes),
      method("begin_dispatch", begin_dispatch),
      method("begin_combine", begin_combine),
      method("next_chunk", next_chunk),
      method("finish", finish),
      method("drop", drop),
      method("new_layer", new_layer),
      method("layer_forward", layer_forward),
      method("layer_backward", layer_backward),
      method("layer_backward_dw", layer_backward_dw),
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_torch_calls",
                                   nullptr,
                                   -1,
                                   methods,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  Owned module(PyModule_Create(&definition));
  return module && make_routes_type(module.get()) ? module.release() : nullptr;
}
