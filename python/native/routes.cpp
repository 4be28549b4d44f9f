#include "routes.hpp"

#include <memory>
#include <unordered_map>

namespace torch_calls {
namespace {

// All of this is used with the GIL only. The maps are never destroyed: at that time, Python is
// gone.

std::unordered_map<int64_t, std::unique_ptr<Caller>>& dispatchers() {
  static auto* const all = new std::unordered_map<int64_t, std::unique_ptr<Caller>>();
  return *all;
}

std::unordered_map<int64_t, PyObject*>& owned_objects() {
  static auto* const all = new std::unordered_map<int64_t, PyObject*>();  // by the tensors' numbers
  return *all;
}

int64_t last_number = 0;
PyObject* routes_type = nullptr;

crossdock_status set_dispatcher_options(void* handle, const crossdock_device_options* options) {
  return crossdock_set_device_options(static_cast<crossdock_dispatcher*>(handle), options);
}

}  // namespace

// ---- Dispatchers ----

Caller* dispatcher_of(PyObject* number) {
  const auto found = dispatchers().find(PyLong_AsLongLong(number));
  if (found != dispatchers().end()) return found->second.get();
  if (PyErr_Occurred() == nullptr) {
    PyErr_SetString(PyExc_RuntimeError,
                    "this crossdock.torch.Dispatcher is closed, or was not kept as long as its "
                    "calls are used");
  }
  return nullptr;
}

PyObject* add_dispatcher(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  auto made = std::make_unique<Caller>();
  made->owner = args[1];
  made->handle = PyLong_AsVoidPtr(args[2]);
  made->rank = share(args[3]);
  made->acquire.reset(PyObject_GetAttrString(args[4], "acquire"));
  made->release.reset(PyObject_GetAttrString(args[4], "release"));
  made->set_options = set_dispatcher_options;
  made->num_local_experts = PyLong_AsLongLong(args[5]);
  made->width = PyLong_AsLongLong(args[6]);
  const int64_t number = PyLong_AsLongLong(args[0]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  dispatchers()[number] = std::move(made);
  return none().release();
}

PyObject* close_dispatcher(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  const auto found = dispatchers().find(PyLong_AsLongLong(args[0]));
  if (found != dispatchers().end()) found->second->handle = nullptr;
  return none().release();
}

PyObject* remove_dispatcher(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  dispatchers().erase(PyLong_AsLongLong(args[0]));
  return none().release();
}

// ---- Plans ----

namespace {

void free_routes(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* routes = reinterpret_cast<Routes*>(self);
  if (crossdock_plan* const plan = routes->plan) {
    without_gil([&] {
      crossdock_plan_destroy(plan);
      return 0;
    });
  }
  Py_XDECREF(routes->core);
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// A dispatcher keeps the plans that CUDA graphs use, and a plan keeps its dispatcher.
int visit_routes(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<Routes*>(self)->core);
  return 0;
}

int clear_routes(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Routes*>(self)->core);
  return 0;
}

PyObject* core_of_routes(PyObject* self, void* /*closure*/) {
  return share(reinterpret_cast<Routes*>(self)->core).release();
}

PyObject* handle_of_routes(PyObject* self, void* /*closure*/) {
  return PyLong_FromVoidPtr(reinterpret_cast<Routes*>(self)->plan);
}

PyObject* num_tokens_of_routes(PyObject* self, void* /*closure*/) {
  return PyLong_FromLongLong(reinterpret_cast<Routes*>(self)->num_tokens);
}

}  // namespace

bool make_routes_type(PyObject* module) {
  static PyGetSetDef attributes[] = {
      {"core", core_of_routes, nullptr, nullptr, nullptr},
      {"_handle", handle_of_routes, nullptr, nullptr, nullptr},
      {"num_tokens", num_tokens_of_routes, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(free_routes)},
      {Py_tp_traverse, reinterpret_cast<void*>(visit_routes)},
      {Py_tp_clear, reinterpret_cast<void*>(clear_routes)},
      {Py_tp_getset, attributes},
      {0, nullptr},
  };
  static PyType_Spec spec = {
      "_torch_calls.Routes", sizeof(Routes), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  routes_type = PyType_FromSpec(&spec);
  return routes_type != nullptr && PyModule_AddObjectRef(module, "Routes", routes_type) == 0;
}

Owned new_routes(Caller& dispatcher) {
  Owned made(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(routes_type), 0));
  if (made) {
    routes_in(made).dispatcher = &dispatcher;
    routes_in(made).core = share(dispatcher.owner).release();
  }
  return made;
}

Owned routes_of(PyObject* tensor) {
  PyObject* const found = owned_by(tensor);
  if (found != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(found)) == routes_type) {
    return share(found);
  }
  PyErr_SetString(PyExc_RuntimeError,
                  "the plan of this call no longer exists: its handle was copied, and the original "
                  "was freed");
  return nullptr;
}

// ---- Tensors that own objects ----

namespace {

struct OwningMemory {
  DLManagedTensorVersioned managed{};
  int64_t shape = 1;
  int64_t stride = 1;
  int64_t number = 0;  // 0: the memory is the object's
  PyObject* object = nullptr;
};

// Called by any thread, with or without the GIL.
void free_owning(DLManagedTensorVersioned* self) {
  const std::unique_ptr<OwningMemory> memory(static_cast<OwningMemory*>(self->manager_ctx));
  if (Py_IsInitialized() == 0) return;  // Python's objects are gone
  const PyGILState_STATE state = PyGILState_Ensure();
  if (memory->number != 0) owned_objects().erase(memory->number);
  Py_DECREF(memory->object);
  PyGILState_Release(state);
}

Owned tensor_in(std::unique_ptr<OwningMemory> memory, const void* data, DLDevice device) {
  memory->managed.version = {.major = 1, .minor = 0};
  memory->managed.manager_ctx = memory.get();
  memory->managed.deleter = free_owning;
  memory->managed.dl_tensor = {.data = const_cast<void*>(data),
                               .device = device,
                               .ndim = 1,
                               .dtype = {.code = kDLInt, .bits = 64, .lanes = 1},
                               .shape = &memory->shape,
                               .strides = &memory->stride,
                               .byte_offset = 0};
  Py_INCREF(memory->object);
  void* made = nullptr;
  const int status = torch.exchange->managed_tensor_to_py_object_no_sync(&memory->managed, &made);
  memory.release();  // torch's, even if it fails: it may have used a part of it
  return Owned(status == 0 ? static_cast<PyObject*>(made) : nullptr);
}

}  // namespace

Owned tensor_owning(PyObject* object) {
  auto memory = std::make_unique<OwningMemory>();
  memory->number = ++last_number;
  memory->object = object;
  owned_objects()[memory->number] = object;
  const int64_t* const number = &memory->number;
  return tensor_in(std::move(memory), number, {.device_type = kDLCPU, .device_id = 0});
}

Owned view_on_device(PyObject* object, const int64_t* memory, int64_t size, int32_t device_index) {
  auto made = std::make_unique<OwningMemory>();
  made->shape = size;
  made->object = object;
  return tensor_in(std::move(made), memory, {.device_type = kDLCUDA, .device_id = device_index});
}

PyObject* owned_by(PyObject* tensor) {
  crossdock_tensor described{};
  bool is_contiguous = false;
  if (!describe(tensor, described, is_contiguous) || described.dtype != CROSSDOCK_I64 ||
      described.num_dims != 1 || described.shape[0] != 1) {
    return nullptr;
  }
  int64_t number = 0;
  if (described.device_kind == CROSSDOCK_CPU) {
    number = *static_cast<const int64_t*>(described.data);
  } else {  // a copy that was moved there
    const Owned item(PyObject_CallMethod(tensor, "item", nullptr));
    number = item ? PyLong_AsLongLong(item.get()) : 0;
    PyErr_Clear();
  }
  const auto found = owned_objects().find(number);
  return found == owned_objects().end() ? nullptr : found->second;
}

PyObject* tensor_owning(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  return tensor_owning(args[0]).release();
}

PyObject* owned_by(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  PyObject* const found = owned_by(args[0]);
  return share(found != nullptr ? found : Py_None).release();
}

}  // namespace torch_calls
