#include "dispatcher_calls.hpp"

#include <utility>

namespace torch_calls {
namespace {

/// On the CPU, larger outputs of rows are memory of the library: other ranks write there directly,
/// combine reads there without a copy, and it is reused. On a GPU all outputs are torch's, which
/// knows the streams that use them.
constexpr int64_t kFewValues = 16384;

crossdock_dispatcher* handle_of(const Caller& caller) {
  return static_cast<crossdock_dispatcher*>(caller.handle);
}

/// An output of rows [R, D].
struct RowsOutput {
  Owned tensor;                       // null: the call provides the memory
  DLManagedTensor* shared = nullptr;  // that memory
  void* stream = nullptr;

  void choose(Call& call, PyObject* like, int64_t num_rows, const Caller& caller,
              crossdock_output& output) {
    crossdock_tensor found{};
    bool is_contiguous = false;
    if (!describe(like, found, is_contiguous)) return;  // the call is refused
    stream = caller.stream;
    if (found.device_kind == CROSSDOCK_CUDA || num_rows * caller.width <= kFewValues) {
      tensor = call.output("rows", like, {num_rows, caller.width}, nullptr, output.tensor);
    }
  }

  /// After the call, without the GIL.
  crossdock_status take(crossdock_status status, crossdock_output& output) {
    if (status != CROSSDOCK_OK || output.owner == nullptr) return status;
    return Call::share_memory(output, stream, shared);
  }

  Owned result() { return shared != nullptr ? tensor_of(shared) : std::move(tensor); }
};

/// A plan and the dispatch with it.
class Dispatch {
 public:
  /// Arguments as those of begin_dispatch.
  Dispatch(Caller& caller, PyObject* const* args, PyObject* scales)
      : caller_(caller), x_(args[0]), routing_(args[1]), weights_(args[2]), scales_(scales) {
    args_.with_row_weights = args[4] == Py_True ? 1 : 0;
  }

  bool plan() {
    Call call(caller_);
    bool is_contiguous = false;
    if (describe(x_, x_found_, is_contiguous)) call.use_stream(x_found_);
    auto routing = sized<crossdock_routing>();
    crossdock_tensor routes{}, counts{};
    call.input("expert_ids", routing_, routes);
    put_weights(call, routing.weights);
    (routes.dtype == CROSSDOCK_BOOL ? routing.map : routing.expert_ids) = routes;
    if (routes.device_kind == CROSSDOCK_CPU) {
      PyObject* const dtype = routes.dtype == CROSSDOCK_I64 ? nullptr : torch.as_int64;
      rows_per_expert =
          call.output("rows_per_expert", routing_, {caller_.num_local_experts}, dtype, counts);
    }
    routes_ = new_routes(caller_);
    if (!routes_) return false;
    Routes& made = routes_in(routes_);
    info_ = sized<crossdock_plan_info>();
    if (!call.run([&] {
          return crossdock_plan_create_described(handle_of(caller_), &routing, &info_,
                                                 static_cast<int64_t*>(counts.data), &made.plan);
        })) {
      return false;
    }
    made.num_tokens = info_.num_tokens;
    made.capacity_rows = info_.capacity_rows;
    made.top_k = info_.weights.shape[1];
    return true;
  }

  /// x and the outputs.
  void put(Call& call) {
    call.input("x", x_, args_.x);
    if (scales_ != Py_None) {
      call.input("scales", scales_, args_.scales);
      const int64_t groups = args_.scales.num_dims == 2 ? args_.scales.shape[1] : 0;
      row_scales = call.output("row_scales", scales_, {info_.capacity_rows, groups}, nullptr,
                               result_.row_scales.tensor);
    }
    if (args_.with_row_weights != 0) {
      const int32_t dtype = dtype_of_sums(x_found_.dtype);
      PyObject* const as = dtype == x_found_.dtype ? nullptr : as_dtype(dtype);
      row_weights =
          call.output("row_weights", x_, {info_.capacity_rows}, as, result_.row_weights.tensor);
    }
  }

  bool dispatch() {
    Call call(caller_);
    put(call);
    RowsOutput output;
    output.choose(call, x_, info_.capacity_rows, caller_, result_.rows);
    const Routes& routes = routes_in(routes_);
    if (!call.run([&] {
          return output.take(crossdock_dispatch(handle_of(caller_), routes.plan, &args_, &result_),
                             result_.rows);
        })) {
      return false;
    }
    rows = output.result();
    return rows && complete();
  }

  bool begin(int32_t num_chunks, crossdock_pending** pending, Owned& kept) {
    Call call(caller_);
    put(call);
    // Torch's memory on the CPU too: chunks are read there before the end of the call.
    rows =
        call.output("rows", x_, {info_.capacity_rows, caller_.width}, nullptr, result_.rows.tensor);
    args_.num_chunks = num_chunks;
    const Routes& routes = routes_in(routes_);
    if (!call.run([&] {
          return crossdock_begin_dispatch(handle_of(caller_), routes.plan, &args_, &result_,
                                          pending);
        })) {
      return false;
    }
    kept = call.take_kept();
    return kept && complete();
  }

  const Owned& routes() const { return routes_; }

  Owned rows, row_weights, row_scales, rows_per_expert, plan_tensor;

 private:
  /// Weights in a dtype that plans accept with these tokens: only fp64 tokens keep fp64 weights.
  void put_weights(Call& call, crossdock_tensor& described) {
    crossdock_tensor found{};
    bool is_contiguous = false;
    const bool is_wide = x_found_.dtype == CROSSDOCK_F64;
    PyObject* given = weights_;
    if (describe(weights_, found, is_contiguous) && found.dtype <= CROSSDOCK_F16 &&
        (found.dtype == CROSSDOCK_F64) != is_wide) {
      const Owned method(PyObject_GetAttrString(weights_, "to"));
      const Owned nothing(PyTuple_New(0));
      PyObject* const dtype = as_dtype(is_wide ? CROSSDOCK_F64 : CROSSDOCK_F32);
      converted_.reset(method && nothing ? PyObject_Call(method.get(), nothing.get(), dtype)
                                         : nullptr);
      if (!converted_) return call.refuse_error("weights");
      given = converted_.get();
    }
    call.input("weights", given, described);
  }

  /// What else the caller gets, once the rows are on their way.
  bool complete() {
    if (!rows_per_expert) {
      const Owned starts = view_on_device(routes_.get(), info_.segment_starts,
                                          caller_.num_local_experts + 1, info_.device_index);
      rows_per_expert.reset(starts ? PyObject_CallMethod(starts.get(), "diff", nullptr) : nullptr);
      if (!rows_per_expert || !keep_for_graph()) return false;
    }
    if (row_weights) {
      row_weights = in_dtype_of(std::move(row_weights), dtype_of_sums(x_found_.dtype), weights_);
      if (!row_weights) return false;
    }
    plan_tensor = tensor_owning(routes_.get());
    return plan_tensor != nullptr;
  }

  /// Replays of a CUDA graph use the plan.
  bool keep_for_graph() {
    const Owned is_captured(PyObject_CallNoArgs(torch.is_capturing));
    if (!is_captured || is_captured.get() == Py_False) return is_captured != nullptr;
    const Owned plans(PyObject_GetAttrString(caller_.owner, "captured"));
    return plans && PyList_Append(plans.get(), routes_.get()) == 0;
  }

  Caller& caller_;
  PyObject *x_, *routing_, *weights_, *scales_;
  crossdock_tensor x_found_{};
  Owned routes_, converted_;
  crossdock_plan_info info_{};
  crossdock_dispatch_args args_ = sized<crossdock_dispatch_args>();
  crossdock_dispatch_result result_ = sized<crossdock_dispatch_result>();
};

PyObject* or_none(const Owned& object) {
  return object ? object.get() : Py_None;
}

}  // namespace

PyObject* dispatch(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Caller* const caller = dispatcher_of(args[3]);
  if (caller == nullptr) return nullptr;
  const Owned kept = share(caller->owner);  // the caller of Python may drop it meanwhile
  const Lock lock(*caller);
  Dispatch made(*caller, args, Py_None);
  if (!lock || !made.plan() || !made.dispatch()) return nullptr;
  return PyTuple_Pack(4, made.rows.get(), or_none(made.row_weights), made.rows_per_expert.get(),
                      made.plan_tensor.get());
}

PyObject* dispatch_scaled(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Caller* const caller = dispatcher_of(args[3]);
  if (caller == nullptr) return nullptr;
  const Owned kept = share(caller->owner);  // the caller of Python may drop it meanwhile
  const Lock lock(*caller);
  Dispatch made(*caller, args, args[5]);
  if (!lock || !made.plan() || !made.dispatch()) return nullptr;
  return PyTuple_Pack(5, made.rows.get(), or_none(made.row_weights), made.rows_per_expert.get(),
                      made.plan_tensor.get(), made.row_scales.get());
}

// ---- Calls with a plan ----

namespace {

using Move = crossdock_status(crossdock_dispatcher*, const crossdock_plan*, const crossdock_tensor*,
                              crossdock_output*);

/// A call with one input and one output [T, width].
Owned move(Move* function, const Routes& routes, const char* name, PyObject* source,
           int64_t width) {
  Caller& caller = *routes.dispatcher;
  const Lock lock(caller);
  if (!lock) return nullptr;
  Call call(caller);
  crossdock_tensor input{};
  crossdock_output output{};
  call.input(name, source, input);
  call.use_stream(input);
  Owned made = call.output("result", source, {routes.num_tokens, width}, nullptr, output.tensor);
  const bool is_done =
      call.run([&] { return function(handle_of(caller), routes.plan, &input, &output); });
  return is_done ? std::move(made) : nullptr;
}

PyObject* move_rows(Move* function, PyObject* plan, const char* name, PyObject* source) {
  const Owned found = routes_of(plan);
  if (!found) return nullptr;
  const Routes& routes = routes_in(found);
  return move(function, routes, name, source, routes.dispatcher->width).release();
}

/// [T, K], or for a map, whose slots are its set bits in ascending order, [T, E].
Owned like_routing(Owned by_slot, PyObject* routing) {
  crossdock_tensor found{};
  bool is_contiguous = false;
  const bool is_map = describe(routing, found, is_contiguous) && found.dtype == CROSSDOCK_BOOL;
  if (!by_slot || !is_map) return by_slot;
  return Owned(PyObject_CallFunctionObjArgs(torch.by_map, by_slot.get(), routing, nullptr));
}

}  // namespace

PyObject* dispatch_backward(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  return move_rows(crossdock_dispatch_backward, args[1], "grad_rows", args[0]);
}

PyObject* combine(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  return move_rows(crossdock_combine, args[3], "y", args[0]);
}

PyObject* combine_unweighted(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  return move_rows(crossdock_combine_unweighted, args[1], "y", args[0]);
}

PyObject* collect_routes(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  const Owned found = routes_of(args[2]);
  if (!found) return nullptr;
  const Routes& routes = routes_in(found);
  Owned by_slot = move(crossdock_collect_routes, routes, "rows", args[0], routes.top_k);
  return like_routing(std::move(by_slot), args[1]).release();
}

PyObject* combine_backward(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  const Owned found = routes_of(args[3]);
  if (!found) return nullptr;
  const Routes& routes = routes_in(found);
  Caller& caller = *routes.dispatcher;
  const Lock lock(caller);
  if (!lock) return nullptr;
  Call call(caller);
  auto given = sized<crossdock_combine_backward_args>();
  auto result = sized<crossdock_combine_backward_result>();
  call.input("grad_out", args[0], given.grad_out);
  call.input("y", args[1], given.y);
  call.use_stream(given.y);
  RowsOutput output;
  output.choose(call, args[1], routes.capacity_rows, caller, result.grad_rows);
  const int32_t dtype = dtype_of_sums(given.y.dtype);
  Owned by_slot =
      call.output("grad_weights", args[1], {routes.num_tokens, routes.top_k},
                  dtype == given.y.dtype ? nullptr : as_dtype(dtype), result.grad_weights.tensor);
  if (!call.run([&] {
        return output.take(
            crossdock_combine_backward(handle_of(caller), routes.plan, &given, &result),
            result.grad_rows);
      })) {
    return nullptr;
  }
  const Owned grad_rows = output.result();
  by_slot = like_routing(std::move(by_slot), args[2]);
  return grad_rows && by_slot ? PyTuple_Pack(2, grad_rows.get(), by_slot.get()) : nullptr;
}

PyObject* combine_unweighted_backward(PyObject* /*module*/, PyObject* const* args,
                                      Py_ssize_t /*num_args*/) {
  const Owned found = routes_of(args[1]);
  if (!found) return nullptr;
  const Routes& routes = routes_in(found);
  Caller& caller = *routes.dispatcher;
  const Lock lock(caller);
  if (!lock) return nullptr;
  Call call(caller);
  auto given = sized<crossdock_dispatch_args>();
  auto result = sized<crossdock_dispatch_result>();
  call.input("grad_out", args[0], given.x);
  call.use_stream(given.x);
  RowsOutput output;
  output.choose(call, args[0], routes.capacity_rows, caller, result.rows);
  const bool is_done = call.run([&] {
    return output.take(crossdock_dispatch(handle_of(caller), routes.plan, &given, &result),
                       result.rows);
  });
  return is_done ? output.result().release() : nullptr;
}

// ---- Calls in two halves ----

namespace {

constexpr const char* kPending = "crossdock pending call";

/// A call that has begun, in a capsule. If it is dropped, the call ends without results.
struct Pending {
  crossdock_pending* call = nullptr;
  Caller* dispatcher = nullptr;
  bool is_dispatch = false;
  Owned routes;  // keeps the dispatcher
  Owned inputs;  // and outputs, which are used until the end

  void end() {
    if (crossdock_pending* const ended = std::exchange(call, nullptr)) {
      without_gil([&] {
        crossdock_pending_destroy(ended);
        return 0;
      });
    }
    inputs.reset();
  }
};

void free_pending(PyObject* capsule) {
  const std::unique_ptr<Pending> pending(
      static_cast<Pending*>(PyCapsule_GetPointer(capsule, kPending)));
  pending->end();
}

Pending* pending_in(PyObject* capsule) {
  return static_cast<Pending*>(PyCapsule_GetPointer(capsule, kPending));
}

/// An empty pending call: before the call, because it owns what the call makes.
Owned new_pending(const Owned& routes, bool is_dispatch) {
  auto made = std::make_unique<Pending>();
  made->dispatcher = routes_in(routes).dispatcher;
  made->routes = share(routes.get());
  made->is_dispatch = is_dispatch;
  Owned capsule(PyCapsule_New(made.get(), kPending, free_pending));
  if (capsule) made.release();
  return capsule;
}

}  // namespace

PyObject* begin_dispatch(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Caller* const caller = dispatcher_of(args[3]);
  if (caller == nullptr) return nullptr;
  const Owned kept = share(caller->owner);  // the caller of Python may drop it meanwhile
  const int64_t given = PyLong_AsLongLong(args[6]);
  PyErr_Clear();  // -1, which the library refuses, as it does others that do not fit
  const auto num_chunks = static_cast<int32_t>(given >= 0 && given <= INT32_MAX ? given : -1);
  const Lock lock(*caller);
  Dispatch made(*caller, args, args[5]);
  if (!lock || !made.plan()) return nullptr;
  const Owned capsule = new_pending(made.routes(), true);
  if (!capsule) return nullptr;
  Pending& pending = *pending_in(capsule.get());
  Owned copies;
  if (!made.begin(num_chunks, &pending.call, copies)) return nullptr;
  PyObject* const weights = or_none(made.row_weights);
  PyObject* const scales = or_none(made.row_scales);
  pending.inputs.reset(
      PyTuple_Pack(6, args[0], args[5], copies.get(), made.rows.get(), weights, scales));
  if (!pending.inputs) return nullptr;
  return PyTuple_Pack(6, capsule.get(), made.rows.get(), weights, made.rows_per_expert.get(),
                      made.plan_tensor.get(), scales);
}

PyObject* begin_combine(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  const Owned found = routes_of(args[1]);
  if (!found) return nullptr;
  const Routes& routes = routes_in(found);
  Caller& caller = *routes.dispatcher;
  const Lock lock(caller);
  const Owned capsule = lock ? new_pending(found, false) : nullptr;
  if (!capsule) return nullptr;
  Pending& pending = *pending_in(capsule.get());
  Call call(caller);
  crossdock_tensor input{};
  crossdock_output output{};
  call.input("y", args[0], input);
  call.use_stream(input);
  const Owned out =
      call.output("out", args[0], {routes.num_tokens, caller.width}, nullptr, output.tensor);
  if (!call.run([&] {
        return crossdock_begin_combine(handle_of(caller), routes.plan, &input, &output,
                                       &pending.call);
      })) {
    return nullptr;
  }
  const Owned copies = call.take_kept();
  pending.inputs.reset(copies ? PyTuple_Pack(3, args[0], copies.get(), out.get()) : nullptr);
  return pending.inputs ? PyTuple_Pack(2, capsule.get(), out.get()) : nullptr;
}

namespace {

/// Prepares a pending call for next_chunk and finish. Null: a Python error is set.
Pending* use_pending(PyObject* capsule, Call& call) {
  Pending* const pending = pending_in(capsule);
  if (pending == nullptr || pending->call == nullptr) {
    if (pending != nullptr) PyErr_SetString(PyExc_ValueError, "the call has been finished already");
    return nullptr;
  }
  crossdock_tensor like{};
  bool is_contiguous = false;
  if (describe(PyTuple_GetItem(pending->inputs.get(), 0), like, is_contiguous)) {
    call.use_stream(like);
  }
  return pending;
}

}  // namespace

PyObject* next_chunk(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Pending* const begun = pending_in(args[0]);
  if (begun == nullptr) return nullptr;
  const Lock lock(*begun->dispatcher);
  Call call(*begun->dispatcher);
  Pending* const pending = lock ? use_pending(args[0], call) : nullptr;
  if (pending == nullptr) return nullptr;
  auto arrived = sized<crossdock_dispatch_result>();
  int64_t first_expert = -1, last_expert = -1;
  if (!call.run([&] {
        return crossdock_next_chunk(handle_of(*pending->dispatcher), pending->call, &arrived,
                                    &first_expert, &last_expert);
      })) {
    return nullptr;
  }
  if (first_expert < 0) return none().release();
  return Py_BuildValue("LL", first_expert, last_expert);
}

PyObject* finish(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Pending* const begun = pending_in(args[0]);
  if (begun == nullptr) return nullptr;
  const Lock lock(*begun->dispatcher);
  Call call(*begun->dispatcher);
  Pending* const pending = lock ? use_pending(args[0], call) : nullptr;
  if (pending == nullptr) return nullptr;
  crossdock_dispatcher* const dispatcher = handle_of(*pending->dispatcher);
  crossdock_pending* const ended = pending->call;
  if (dispatcher != nullptr) pending->call = nullptr;  // the call frees it
  auto rows = sized<crossdock_dispatch_result>();
  crossdock_output out{};
  const bool is_done = call.run([&] {
    return pending->is_dispatch ? crossdock_finish_dispatch(dispatcher, ended, &rows)
                                : crossdock_finish_combine(dispatcher, ended, &out);
  });
  if (is_done) pending->inputs.reset();
  return is_done ? none().release() : nullptr;
}

PyObject* drop(PyObject* /*module*/, PyObject* const* args, Py_ssize_t /*num_args*/) {
  Pending* const pending = pending_in(args[0]);
  if (pending == nullptr) return nullptr;
  pending->end();
  return none().release();
}

}  // namespace torch_calls
