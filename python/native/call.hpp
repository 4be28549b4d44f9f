// One call of the library with tensors of torch: what comes in, what goes out, what is refused.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>

#include "capi/dlpack.hpp"
#include "crossdock/crossdock.h"

namespace torch_calls {

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

/// Another reference to the object.
inline Owned share(PyObject* object) {
  Py_XINCREF(object);
  return Owned(object);
}

/// Set once, by `prepare`.
struct Torch {
  const DLPackExchangeAPI* exchange = nullptr;
  PyObject* fail = nullptr;    // fail(rank, cause): raises the library's last error
  PyObject* refuse = nullptr;  // refuse(name, tensor or exception) -> exception: the library's
                               // next call is refused because of this argument
  PyObject* caught = nullptr;  // {thread: exception}, empty unless a callback has caught one
  PyObject* raise_caught = nullptr;  // raise_caught()
  PyObject* is_capturing = nullptr;  // whether the current CUDA stream is being captured
  PyObject* by_map = nullptr;        // by_map([T, K], map [T, E]) -> [T, E]
  PyObject* as_int64 = nullptr;      // {"dtype": torch.int64}
  PyObject* as_fp32 = nullptr;
  PyObject* as_fp64 = nullptr;
  PyObject* new_empty = nullptr;  // names of methods and attributes
  PyObject* shape = nullptr;
};
extern Torch torch;

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
template <typename Function>
auto without_gil(const Function& function) {
  PyThreadState* const state = PyEval_SaveThread();
  const auto result = function();
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {
    while (true) pause();
  }
  return result;
}

/// A dispatcher or a layer, as its calls need it.
struct Caller {
  void* handle = nullptr;     // null once closed, which the library refuses
  PyObject* owner = nullptr;  // borrowed: the object of Python that has this caller
  Owned rank;
  Owned acquire;  // of the lock that is held during calls
  Owned release;
  crossdock_status (*set_options)(void* handle, const crossdock_device_options* options) = nullptr;
  int64_t num_local_experts = 0;
  int64_t width = 0;
  void* stream = nullptr;
  bool has_stream = false;
};

/// Holds the lock of a caller. False: interrupted, with a Python error set.
class Lock {
 public:
  explicit Lock(const Caller& caller);
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  explicit operator bool() const { return is_held_; }

 private:
  const Caller& caller_;
  bool is_held_;
};

/// Describes a tensor. False if the library cannot use it, not even a contiguous copy of it.
bool describe(PyObject* tensor, crossdock_tensor& described, bool& is_contiguous);

/// The dtype in which the library keeps sums and weights for tensors of this dtype.
inline int32_t dtype_of_sums(int32_t dtype) {
  return dtype == CROSSDOCK_F64 ? CROSSDOCK_F64 : CROSSDOCK_F32;
}
/// The keyword arguments for new_empty and to: {"dtype": ...}.
PyObject* as_dtype(int32_t dtype);

/// tensor.to(dtype of like), if that differs. `dtype`: that of the tensor.
Owned in_dtype_of(Owned tensor, int32_t dtype, PyObject* like);

/// A new tensor that shares memory of the library, and releases it. Consumes `memory`.
Owned tensor_of(DLManagedTensor* memory);

/// One call. A rank must not raise an error before a collective call: the others would wait for it.
/// So a tensor that cannot be used, or allocated, makes the library refuse the call, on all ranks.
/// The lock of the caller must be held.
class Call {
 public:
  explicit Call(Caller& caller) : caller_(caller) {}
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  /// An input, contiguous; copies are kept as long as this object. None: not given.
  void input(const char* name, PyObject* tensor, crossdock_tensor& described);
  /// A number; 0 if it is none.
  int64_t integer(const char* name, PyObject* number);
  double real(const char* name, PyObject* number);
  /// A new tensor for a result, like.new_empty(*shape).
  Owned output(const char* name, PyObject* like, std::initializer_list<int64_t> shape,
               PyObject* dtype, crossdock_tensor& described);
  Owned output_like(const char* name, PyObject* like, PyObject* dtype, crossdock_tensor& described);
  /// Memory of the library, once the call has set it, as a tensor. Without the GIL.
  static crossdock_status share_memory(crossdock_output& output, void* stream,
                                       DLManagedTensor*& shared);
  /// Makes the calls of this tensor's device in torch's current stream.
  void use_stream(const crossdock_tensor& tensor);
  /// Makes a refused call of an argument, or of the current Python error.
  void refuse(const char* name, PyObject* tensor_or_error);
  void refuse_error(const char* name);

  /// For calls that are not collective: raises what would be refused. True: a Python error is set.
  bool raise_refusal();
  /// Makes the call. False if it fails, with a Python error set.
  template <typename Function>
  bool run(const Function& function) {
    return !has_error_ && finish(without_gil(function));
  }

  /// Copies of inputs.
  Owned take_kept();

 private:
  bool finish(crossdock_status status);
  Owned new_empty(const char* name, PyObject* like, const Owned& sizes, PyObject* dtype,
                  crossdock_tensor& described);

  Caller& caller_;
  Owned refusal_;           // why this call is refused
  bool has_error_ = false;  // a Python error that ends this rank's call is set
  std::array<Owned, 32> kept_;
  size_t num_kept_ = 0;
};

inline Owned none() {
  return share(Py_None);
}

}  // namespace torch_calls
