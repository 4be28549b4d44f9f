#include "call.hpp"

namespace torch_calls {

Torch torch;

namespace {

Owned call_method(PyObject* object, const char* name) {
  const Owned method(PyObject_GetAttrString(object, name));
  return Owned(method ? PyObject_CallNoArgs(method.get()) : nullptr);
}

}  // namespace

bool describe(PyObject* tensor, crossdock_tensor& described, bool& is_contiguous) {
  DLTensor given{};
  if (torch.exchange->dltensor_from_py_object_no_sync(tensor, &given) != 0) {
    PyErr_Clear();
    return false;
  }
  namespace dlpack = crossdock::dlpack;
  const bool is_known = dlpack::is_on_host(given) || dlpack::is_on_gpu(given);
  if (!is_known || dlpack::dtype_of(given.dtype) == 0 || given.ndim < 1 || given.ndim > 4) {
    return false;
  }
  described = dlpack::tensor_of(given);
  is_contiguous = dlpack::is_contiguous(given);
  return true;
}

PyObject* as_dtype(int32_t dtype) {
  if (dtype == CROSSDOCK_I64) return torch.as_int64;
  return dtype == CROSSDOCK_F64 ? torch.as_fp64 : torch.as_fp32;
}

Owned in_dtype_of(Owned tensor, int32_t dtype, PyObject* like) {
  crossdock_tensor wanted{};
  bool is_contiguous = false;
  if (!tensor || (describe(like, wanted, is_contiguous) && wanted.dtype == dtype)) return tensor;
  const Owned name(PyObject_GetAttrString(like, "dtype"));
  return Owned(name ? PyObject_CallMethod(tensor.get(), "to", "O", name.get()) : nullptr);
}

// ---- The lock ----

Lock::Lock(const Caller& caller)
    : caller_(caller), is_held_(Owned(PyObject_CallNoArgs(caller.acquire.get())) != nullptr) {}

Lock::~Lock() {
  if (!is_held_) return;
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  const Owned done(PyObject_CallNoArgs(caller_.release.get()));
  PyErr_Restore(type, error, trace);
}

// ---- Memory of the library ----

namespace {

/// Memory of the library in the form that torch takes over.
struct SharedMemory {
  DLManagedTensorVersioned managed{};
  DLManagedTensor* memory = nullptr;
  std::array<int64_t, 4> strides{};
};

void release_memory(DLManagedTensorVersioned* self) {
  const std::unique_ptr<SharedMemory> shared(static_cast<SharedMemory*>(self->manager_ctx));
  shared->memory->deleter(shared->memory);
}

}  // namespace

Owned tensor_of(DLManagedTensor* memory) {
  auto shared = std::make_unique<SharedMemory>();
  shared->memory = memory;
  shared->managed.version = {.major = 1, .minor = 0};
  shared->managed.manager_ctx = shared.get();
  shared->managed.deleter = release_memory;
  DLTensor& tensor = shared->managed.dl_tensor = memory->dl_tensor;
  int64_t stride = 1;
  for (int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
    shared->strides[static_cast<size_t>(dim)] = stride;
    stride *= tensor.shape[dim];
  }
  tensor.strides = shared->strides.data();
  void* made = nullptr;
  const int status = torch.exchange->managed_tensor_to_py_object_no_sync(&shared->managed, &made);
  shared.release();  // torch's, even if it fails: it may have used a part of it
  return Owned(status == 0 ? static_cast<PyObject*>(made) : nullptr);
}

crossdock_status Call::share_memory(crossdock_output& output, void* stream,
                                    DLManagedTensor*& shared) {
  void* managed = nullptr;
  const crossdock_status status = crossdock_output_to_dlpack(&output, stream, &managed);
  shared = static_cast<DLManagedTensor*>(managed);
  const crossdock_status released = crossdock_output_release(&output, stream);
  return status != CROSSDOCK_OK ? status : released;
}

// ---- Arguments ----

Call::~Call() {
  if (refusal_) crossdock_refuse_next_call(nullptr);  // still pending if the call was not made
}

void Call::refuse(const char* name, PyObject* tensor_or_error) {
  if (refusal_ || has_error_) return;
  refusal_.reset(PyObject_CallFunction(torch.refuse, "sO", name, tensor_or_error));
  has_error_ = !refusal_;
}

void Call::refuse_error(const char* name) {
  if (has_error_) return;
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) {  // an interrupt
    has_error_ = true;
    return;
  }
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  const Owned owned_type(type), owned_error(error), owned_trace(trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  refuse(name, error);
}

void Call::input(const char* name, PyObject* tensor, crossdock_tensor& described) {
  if (tensor == Py_None || has_error_) return;
  bool is_contiguous = false;
  if (!describe(tensor, described, is_contiguous)) return refuse(name, tensor);
  if (is_contiguous) return;
  Owned copy = call_method(tensor, "contiguous");
  if (!copy) return refuse_error(name);
  if (!describe(copy.get(), described, is_contiguous) || !is_contiguous) {
    return refuse(name, copy.get());
  }
  kept_.at(num_kept_++) = std::move(copy);
}

int64_t Call::integer(const char* name, PyObject* number) {
  const int64_t value = has_error_ ? 0 : PyLong_AsLongLong(number);
  if (value == -1 && !has_error_ && PyErr_Occurred() != nullptr) refuse_error(name);
  return value;
}

double Call::real(const char* name, PyObject* number) {
  const double value = has_error_ ? 0 : PyFloat_AsDouble(number);
  if (value == -1 && !has_error_ && PyErr_Occurred() != nullptr) refuse_error(name);
  return value;
}

Owned Call::output(const char* name, PyObject* like, std::initializer_list<int64_t> shape,
                   PyObject* dtype, crossdock_tensor& described) {
  if (has_error_ || refusal_) return nullptr;
  const Owned sizes(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  Py_ssize_t dim = 0;
  for (const int64_t size : shape) {
    if (sizes) PyTuple_SetItem(sizes.get(), dim++, PyLong_FromLongLong(size));
  }
  return new_empty(name, like, sizes, dtype, described);
}

Owned Call::output_like(const char* name, PyObject* like, PyObject* dtype,
                        crossdock_tensor& described) {
  if (has_error_ || refusal_) return nullptr;
  const Owned shape(PyObject_GetAttr(like, torch.shape));
  const Owned sizes(shape ? PyTuple_Pack(1, shape.get()) : nullptr);
  return new_empty(name, like, sizes, dtype, described);
}

Owned Call::new_empty(const char* name, PyObject* like, const Owned& sizes, PyObject* dtype,
                      crossdock_tensor& described) {
  const Owned method(sizes ? PyObject_GetAttr(like, torch.new_empty) : nullptr);
  Owned made(method ? PyObject_Call(method.get(), sizes.get(), dtype) : nullptr);
  bool is_contiguous = false;
  if (!made) {
    refuse_error(name);
  } else if (!describe(made.get(), described, is_contiguous)) {
    refuse(name, made.get());
    made.reset();
  }
  return made;
}

void Call::use_stream(const crossdock_tensor& tensor) {
  if (tensor.device_kind != CROSSDOCK_CUDA || has_error_) return;
  void* stream = nullptr;
  if (torch.exchange->current_work_stream(kDLCUDA, tensor.device_index, &stream) != 0) {
    return refuse_error("");
  }
  if (caller_.has_stream && stream == caller_.stream) return;
  auto options = sized<crossdock_device_options>();
  options.stream = stream;
  const auto set = [&] { return caller_.set_options(caller_.handle, &options); };
  if (without_gil(set) != CROSSDOCK_OK) {
    const Owned failed(PyObject_CallFunctionObjArgs(torch.fail, caller_.rank.get(), nullptr));
    has_error_ = true;
    return;
  }
  caller_.stream = stream;
  caller_.has_stream = true;
}

bool Call::raise_refusal() {
  if (refusal_ && !has_error_) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(refusal_.get())), refusal_.get());
    has_error_ = true;
  }
  return has_error_;
}

bool Call::finish(crossdock_status status) {
  Owned cause = std::move(refusal_);
  if (cause) crossdock_refuse_next_call(nullptr);
  if (status != CROSSDOCK_OK) {
    const Owned failed(PyObject_CallFunctionObjArgs(torch.fail, caller_.rank.get(),
                                                    cause ? cause.get() : Py_None, nullptr));
    return false;
  }
  if (PyDict_Size(torch.caught) == 0) return true;
  return Owned(PyObject_CallNoArgs(torch.raise_caught)) != nullptr;
}

Owned Call::take_kept() {
  Owned kept(PyTuple_New(static_cast<Py_ssize_t>(num_kept_)));
  for (size_t i = 0; kept && i < num_kept_; ++i) {
    PyTuple_SetItem(kept.get(), static_cast<Py_ssize_t>(i), kept_[i].release());
  }
  return kept;
}

}  // namespace torch_calls
