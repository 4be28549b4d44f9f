#include "layer_calls.hpp"

namespace torch_calls {
namespace {

constexpr const char* kLayer = "crossdock layer";
constexpr int kNumParameters = 10;
constexpr int kFirstOfExperts = 2;

crossdock_layer* layer_of(const Caller& layer) {
  return static_cast<crossdock_layer*>(layer.handle);
}

crossdock_status set_layer_options(void* handle, const crossdock_device_options* options) {
  return crossdock_layer_set_device_options(static_cast<crossdock_layer*>(handle), options);
}

void free_layer(PyObject* capsule) {
  const std::unique_ptr<Caller> layer(static_cast<Caller*>(PyCapsule_GetPointer(capsule, kLayer)));
  Py_DECREF(layer->owner);
}

Caller* layer_in(PyObject* capsule) {
  return static_cast<Caller*>(PyCapsule_GetPointer(capsule, kLayer));
}

PyObject* tensor_at(PyObject* tensors, int index) {
  return PyTuple_GetItem(tensors, index);
}

/// A parameter of a layer: its tensor in the structs of the C API, its name in messages.
struct Parameter {
  crossdock_tensor& tensor;
  const char* name;
  bool is_matrix;  // of experts: on a GPU its gradient has its dtype
};

template <typename Struct>  // crossdock_layer_weights or _gradients
std::array<Parameter, kNumParameters> parameters_of(Struct& of) {
  return {{{of.gate, "gate", false},
           {of.gate_bias, "gate_bias", false},
           {of.experts.w1, "experts.w1", true},
           {of.experts.w2, "experts.w2", true},
           {of.experts.b1, "experts.b1", false},
           {of.experts.b2, "experts.b2", false},
           {of.shared.w1, "shared.w1", true},
           {of.shared.w2, "shared.w2", true},
           {of.shared.b1, "shared.b1", false},
           {of.shared.b2, "shared.b2", false}}};
}

void put_weights(Call& call, PyObject* tensors, crossdock_layer_weights& weights) {
  int index = 0;
  for (const Parameter& parameter : parameters_of(weights)) {
    call.input(parameter.name, tensor_at(tensors, ++index), parameter.tensor);
  }
  call.input("expert_bias", tensor_at(tensors, ++index), weights.expert_bias);
}

/// Outputs for the gradients of parameters.
class Gradients {
 public:
  /// `tensor` is the parameter.
  void put(Call& call, int index, PyObject* tensor, int32_t dtype_of_tokens) {
    const Parameter parameter = parameters_of(made_)[static_cast<size_t>(index)];
    crossdock_tensor found{};
    bool is_contiguous = false;
    if (!describe(tensor, found, is_contiguous)) return call.refuse(parameter.name, tensor);
    int32_t dtype = dtype_of_sums(parameter.is_matrix ? found.dtype : dtype_of_tokens);
    if (parameter.is_matrix && found.device_kind == CROSSDOCK_CUDA) dtype = found.dtype;
    PyObject* const as = dtype == found.dtype ? nullptr : as_dtype(dtype);
    tensors_.at(static_cast<size_t>(index)) =
        call.output_like(parameter.name, tensor, as, parameter.tensor);
    dtypes_.at(static_cast<size_t>(index)) = dtype;
  }

  const crossdock_layer_gradients& args() const { return made_; }

  /// The gradient in the dtype of its parameter; None if it was not made.
  Owned result(int index, PyObject* parameter) {
    const auto at = static_cast<size_t>(index);
    return tensors_.at(at) ? in_dtype_of(std::move(tensors_.at(at)), dtypes_.at(at), parameter)
                           : none();
  }

 private:
  crossdock_layer_gradients made_{};
  std::array<Owned, kNumParameters> tensors_;
  std::array<int32_t, kNumParameters> dtypes_{};
};

crossdock_layer_saved* saved_in(PyObject* number) {
  return number == Py_None ? nullptr
                           : static_cast<crossdock_layer_saved*>(PyLong_AsVoidPtr(number));
}

Owned fields_of(const crossdock_tensor& tensor) {
  return Owned(Py_BuildValue("NLLLLiiii", PyLong_FromVoidPtr(tensor.data), tensor.shape[0],
                             tensor.shape[1], tensor.shape[2], tensor.shape[3], tensor.num_dims,
                             tensor.dtype, tensor.device_kind, tensor.device_index));
}

}  // namespace

PyObject* new_layer(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  auto made = std::make_unique<Caller>();
  made->handle = PyLong_AsVoidPtr(args[1]);
  made->rank = share(args[2]);
  made->acquire.reset(PyObject_GetAttrString(args[3], "acquire"));
  made->release.reset(PyObject_GetAttrString(args[3], "release"));
  made->set_options = set_layer_options;
  if (PyErr_Occurred() != nullptr) return nullptr;
  PyObject* const capsule = PyCapsule_New(made.get(), kLayer, free_layer);
  if (capsule == nullptr) return nullptr;
  made->owner = share(args[0]).release();
  made.release();
  return capsule;
}

PyObject* layer_forward(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Caller* const layer = layer_in(args[0]);
  if (layer == nullptr) return nullptr;
  PyObject* const tensors = args[1];
  auto given = sized<crossdock_layer_forward_args>();
  given.earlier = saved_in(args[5]);
  const Lock lock(*layer);
  if (!lock) return nullptr;
  Call call(*layer);
  given.num_sequences = call.integer("num_sequences", args[2]);
  given.total_sequences = call.integer("total_sequences", args[3]);
  given.jitter_seed = static_cast<uint64_t>(call.integer("jitter_seed", args[4]));
  call.input("x", tensor_at(tensors, 0), given.x);
  put_weights(call, tensors, given.weights);
  call.input("mask", tensor_at(tensors, 12), given.mask);
  call.input("sequence_ids", tensor_at(tensors, 13), given.sequence_ids);
  call.input("forced_ids", tensor_at(tensors, 14), given.forced_ids);
  call.input("token_ids", tensor_at(tensors, 15), given.token_ids);
  call.use_stream(given.x);
  auto result = sized<crossdock_layer_forward_result>();
  const Owned out = call.output_like("out", tensor_at(tensors, 0), nullptr, result.out.tensor);
  crossdock_layer_saved* saved = nullptr;
  crossdock_layer_saved** const kept = args[6] == Py_True ? &saved : nullptr;
  if (!call.run([&] { return crossdock_layer_forward(layer_of(*layer), &given, &result, kept); })) {
    return nullptr;
  }
  const Owned losses(Py_BuildValue("ddddd", result.aux_loss, result.z_loss, result.aux_batch_loss,
                                   result.aux_sequence_loss, result.aux_global_batch_loss));
  const Owned on_device = fields_of(result.device_losses);
  const Owned handle = saved == nullptr ? none() : Owned(PyLong_FromVoidPtr(saved));
  const bool is_complete = losses && on_device && handle;
  PyObject* const made =
      is_complete ? PyTuple_Pack(4, out.get(), losses.get(), handle.get(), on_device.get())
                  : nullptr;
  if (made == nullptr) crossdock_layer_saved_destroy(saved);
  return made;
}

PyObject* layer_backward(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Caller* const layer = layer_in(args[0]);
  if (layer == nullptr) return nullptr;
  PyObject *const tensors = args[1], *const wanted = args[4];
  auto given = sized<crossdock_layer_backward_args>();
  given.delay_dw = args[6] == Py_True ? 1 : 0;
  crossdock_layer_saved* const saved = saved_in(args[3]);
  const Lock lock(*layer);
  if (!lock) return nullptr;
  Call call(*layer);
  const double grad_losses = call.real("grad_losses", args[5]);
  given.grad_losses = &grad_losses;
  call.input("x", tensor_at(tensors, 0), given.x);
  put_weights(call, tensors, given.weights);
  call.input("grad_out", args[2], given.grad_out);
  call.use_stream(given.x);
  Gradients gradients;
  for (int i = 0; i < (given.delay_dw != 0 ? kFirstOfExperts : kNumParameters); ++i) {
    if (PyList_GetItem(wanted, i) != Py_True) continue;
    gradients.put(call, i, tensor_at(tensors, 1 + i), given.x.dtype);
  }
  given.grads = gradients.args();
  crossdock_output output{};
  Owned grad_x = call.output_like("grad_x", tensor_at(tensors, 0), nullptr, output.tensor);
  if (!call.run(
          [&] { return crossdock_layer_backward(layer_of(*layer), &given, saved, &output); })) {
    return nullptr;
  }
  Owned results(PyTuple_New(1 + kNumParameters));
  if (!results) return nullptr;
  PyTuple_SetItem(results.get(), 0, grad_x.release());
  for (int i = 0; i < kNumParameters; ++i) {
    Owned made = gradients.result(i, tensor_at(tensors, 1 + i));
    if (!made) return nullptr;
    PyTuple_SetItem(results.get(), 1 + i, made.release());
  }
  return results.release();
}

PyObject* layer_backward_dw(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Caller* const layer = layer_in(args[0]);
  if (layer == nullptr) return nullptr;
  PyObject* const parameters = args[4];
  auto given = sized<crossdock_layer_backward_args>();
  given.delay_dw = 1;
  const crossdock_layer_saved* const saved = saved_in(args[3]);
  const Lock lock(*layer);
  if (!lock) return nullptr;
  Call call(*layer);
  call.input("x", args[1], given.x);
  call.input("grad_out", args[2], given.grad_out);
  call.use_stream(given.x);
  Gradients gradients;
  for (int i = kFirstOfExperts; i < kNumParameters; ++i) {
    PyObject* const parameter = tensor_at(parameters, i - kFirstOfExperts);
    if (parameter != Py_None) gradients.put(call, i, parameter, given.x.dtype);
  }
  given.grads = gradients.args();
  if (call.raise_refusal()) return nullptr;
  if (!call.run([&] { return crossdock_layer_backward_dw(layer_of(*layer), &given, saved); })) {
    return nullptr;
  }
  Owned results(PyTuple_New(kNumParameters - kFirstOfExperts));
  for (int i = kFirstOfExperts; results && i < kNumParameters; ++i) {
    Owned made = gradients.result(i, tensor_at(parameters, i - kFirstOfExperts));
    if (!made) return nullptr;
    PyTuple_SetItem(results.get(), i - kFirstOfExperts, made.release());
  }
  return results.release();
}

}  // namespace torch_calls
