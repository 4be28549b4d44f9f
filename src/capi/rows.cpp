// The calls that move rows.
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"

namespace crossdock::capi {
namespace {

// The dispatcher and the plan of a call. An unusable plan becomes an empty one, which all ranks
// refuse.
struct Target {
  Target(crossdock_dispatcher* dispatcher, const crossdock_plan* given, const char* operation_in)
      : owner(handle("dispatcher", dispatcher)),
        plan(is_usable(given) ? given->plan : Plan()),
        operation(operation_in) {
    owner.group->open();
  }

  Dispatcher& dispatcher() const { return owner.dispatcher; }
  MemorySource memory() const { return {.group = owner.group, .stream = owner.stream}; }
  Call call() const { return call_of(owner.dispatcher, owner.dispatcher.group(), operation, plan); }

  crossdock_dispatcher& owner;
  Plan plan;
  const char* operation;
};

// Views of rows that have arrived; a pending dispatch owns them.
crossdock_dispatch_result from_arrived(const DispatchResult& arrived) {
  auto result = default_struct<crossdock_dispatch_result>();
  result.rows.tensor = from_view(arrived.rows.view);
  if (arrived.row_scales.view.given()) {
    result.row_scales.tensor = from_view(arrived.row_scales.view);
  }
  if (arrived.row_weights.view.given()) {
    result.row_weights.tensor = from_view(arrived.row_weights.view);
  }
  return result;
}

std::function<void(const DispatchResult&, const DispatchChunk&)> to_on_chunk(
    const crossdock_dispatch_args& args) {
  if (args.on_chunk == nullptr) return {};
  return [on_chunk = args.on_chunk, context = args.on_chunk_context](const DispatchResult& arrived,
                                                                     const DispatchChunk& chunk) {
    if (have_calls_ended()) throw Error(ErrorCode::kCommunication, "the program is exiting");
    const crossdock_dispatch_result result = from_arrived(arrived);
    const crossdock_status status = call_back(
        [&] { return on_chunk(context, &result, chunk.first_expert, chunk.last_expert); });
    const std::string reason = take_callback_error();
    if (status == CROSSDOCK_OK) return;
    throw Error(code_of(status),
                concat("the callback on_chunk failed: ",
                       reason.empty() ? crossdock_status_name(status) : reason.c_str()));
  };
}

DispatchArgs to_args(const crossdock_dispatch_args& args, const crossdock_dispatch_result& given) {
  DispatchArgs made;
  made.x = to_view("x", args.x);
  made.scales = to_view("scales", args.scales);
  made.rows = given_output("rows", given.rows);
  made.row_scales = given_output("row_scales", given.row_scales);
  made.row_weights = given_output("row_weights", given.row_weights);
  made.with_row_weights = args.with_row_weights != 0;
  CROSSDOCK_CHECK(args.num_chunks >= 0, "num_chunks must be 0 (one chunk) or positive, got ",
                  args.num_chunks);
  made.num_chunks = args.num_chunks == 0 ? 1 : args.num_chunks;
  made.on_chunk = to_on_chunk(args);
  return made;
}

constexpr const char* kDispatchArgs = "crossdock_dispatch_args";
constexpr const char* kDispatchResult = "crossdock_dispatch_result";
constexpr const char* kBackwardResult = "crossdock_combine_backward_result";

crossdock_dispatch_result read_result(const crossdock_dispatch_result* result) {
  return read_struct(kDispatchResult, result, offsetof(crossdock_dispatch_result, row_scales));
}

// REQUIRES: a checked result.
void set_result(crossdock_dispatch_result* result, DispatchResult made,
                const MemorySource& source) {
  using Struct = crossdock_dispatch_result;
  const Result results[] = {{find_field(result, &Struct::rows), &made.rows},
                            {find_field(result, &Struct::row_scales), &made.row_scales},
                            {find_field(result, &Struct::row_weights), &made.row_weights}};
  set_outputs(results, source);
}

crossdock_combine_backward_result read_result(const crossdock_combine_backward_result* result) {
  return read_struct(kBackwardResult, result,
                     offsetof(crossdock_combine_backward_result, grad_weights));
}

void set_result(crossdock_combine_backward_result* result, CombineBackwardResult made,
                const MemorySource& source) {
  using Struct = crossdock_combine_backward_result;
  const Result results[] = {{find_field(result, &Struct::grad_rows), &made.grad_rows},
                            {find_field(result, &Struct::grad_weights), &made.grad_weights}};
  set_outputs(results, source);
}

void set_result(crossdock_output* output, OwnedTensor made, const MemorySource& source) {
  const Result results[] = {{output, &made}};
  set_outputs(results, source);
}

// The tensors of a call with one input and one output, and their names for messages.
struct OneTensor {
  const char* input_name;
  const crossdock_tensor* input;
  const char* output_name;
  crossdock_output* output;
};

template <typename Move>
void move_tensor(const Target& target, const OneTensor& tensors, const Move& move) {
  ConstTensorView from;
  TensorView to;
  convert(target.call(), [&] {
    from = to_view(tensors.input_name, tensors.input);
    to = given_output(tensors.output_name, tensors.output);
  });
  set_result(tensors.output, move(from, to), target.memory());
}

// A pending call. It is not consumed until all arguments of finish have been checked.
template <typename Made>
Pending<Made>& pending_call(const crossdock_dispatcher* dispatcher, crossdock_pending* pending,
                            const char* wanted) {
  crossdock_pending& begun = handle("pending", pending);
  CROSSDOCK_CHECK(begun.dispatcher == &handle("dispatcher", dispatcher),
                  "a pending call must be finished by the dispatcher that began it");
  auto* call = std::get_if<Pending<Made>>(&begun.call);
  CROSSDOCK_CHECK(call != nullptr, "pending must be a ", wanted,
                  ", got a call that another function must finish");
  return *call;
}

}  // namespace
}  // namespace crossdock::capi

using namespace crossdock;
using capi::guarded;
using capi::pointee;

crossdock_status crossdock_dispatch(crossdock_dispatcher* dispatcher, const crossdock_plan* plan,
                                    const crossdock_dispatch_args* args,
                                    crossdock_dispatch_result* result) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "dispatch");
    DispatchArgs converted;
    capi::convert(target.call(), [&] {
      const auto outputs = capi::read_result(result);
      converted = capi::to_args(capi::read_struct(capi::kDispatchArgs, args), outputs);
    });
    capi::set_result(result, target.dispatcher().dispatch(target.plan, converted), target.memory());
  });
}

crossdock_status crossdock_pass_chunk(void* chunk, const crossdock_dispatch_result* result,
                                      int64_t first_expert, int64_t last_expert) {
  auto& passed = *static_cast<crossdock_chunk*>(chunk);
  passed.result = result;
  passed.first_expert = first_expert;
  passed.last_expert = last_expert;
  passed.status = CROSSDOCK_COMMUNICATION;
  passed.callback(&passed);
  return passed.status;
}

crossdock_status crossdock_dispatch_backward(crossdock_dispatcher* dispatcher,
                                             const crossdock_plan* plan,
                                             const crossdock_tensor* grad_rows,
                                             crossdock_output* grad_x) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "dispatch_backward");
    capi::move_tensor(target, {"grad_rows", grad_rows, "grad_x", grad_x},
                      [&](ConstTensorView from, TensorView to) {
                        return target.dispatcher().dispatch_backward(target.plan, from, to);
                      });
  });
}

crossdock_status crossdock_combine(crossdock_dispatcher* dispatcher, const crossdock_plan* plan,
                                   const crossdock_tensor* y, crossdock_output* out) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "combine");
    capi::move_tensor(target, {"y", y, "out", out}, [&](ConstTensorView from, TensorView to) {
      return target.dispatcher().combine(target.plan, from, to);
    });
  });
}

crossdock_status crossdock_combine_unweighted(crossdock_dispatcher* dispatcher,
                                              const crossdock_plan* plan, const crossdock_tensor* y,
                                              crossdock_output* out) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "combine_unweighted");
    capi::move_tensor(target, {"y", y, "out", out}, [&](ConstTensorView from, TensorView to) {
      return target.dispatcher().combine_unweighted(target.plan, from, to);
    });
  });
}

crossdock_status crossdock_combine_backward(crossdock_dispatcher* dispatcher,
                                            const crossdock_plan* plan,
                                            const crossdock_combine_backward_args* args,
                                            crossdock_combine_backward_result* result) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "combine_backward");
    CombineBackwardArgs converted;
    capi::convert(target.call(), [&] {
      const auto outputs = capi::read_result(result);
      const auto given = capi::read_struct("crossdock_combine_backward_args", args);
      converted = {.grad_out = capi::to_view("grad_out", given.grad_out),
                   .y = capi::to_view("y", given.y),
                   .grad_rows = capi::given_output("grad_rows", outputs.grad_rows),
                   .grad_weights = capi::given_output("grad_weights", outputs.grad_weights)};
    });
    capi::set_result(result, target.dispatcher().combine_backward(target.plan, converted),
                     target.memory());
  });
}

crossdock_status crossdock_collect_routes(crossdock_dispatcher* dispatcher,
                                          const crossdock_plan* plan, const crossdock_tensor* rows,
                                          crossdock_output* routes) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "collect_routes");
    capi::move_tensor(target, {"rows", rows, "routes", routes},
                      [&](ConstTensorView from, TensorView to) {
                        return target.dispatcher().collect_routes(target.plan, from, to);
                      });
  });
}

crossdock_status crossdock_allocate_rows(crossdock_dispatcher* dispatcher,
                                         const crossdock_plan* plan, int32_t dtype,
                                         crossdock_output* rows) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "allocate_rows");
    CROSSDOCK_CHECK(!capi::given_output("rows", rows).given(),
                    "rows must be empty: crossdock_allocate_rows provides the memory");
    capi::set_result(rows,
                     target.dispatcher().allocate_rows(target.plan, capi::to_dtype("rows", dtype)),
                     target.memory());
  });
}

crossdock_status crossdock_begin_dispatch(crossdock_dispatcher* dispatcher,
                                          const crossdock_plan* plan,
                                          const crossdock_dispatch_args* args,
                                          const crossdock_dispatch_result* given,
                                          crossdock_pending** pending) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "dispatch");
    DispatchArgs converted;
    std::unique_ptr<crossdock_pending> made;
    capi::convert(target.call(), [&] {
      pointee("pending", pending);
      made = std::make_unique<crossdock_pending>(target.owner);
      converted = capi::to_args(capi::read_struct(capi::kDispatchArgs, args),
                                capi::read_optional(capi::kDispatchResult, given));
    });
    made->call = target.dispatcher().begin_dispatch(target.plan, converted);
    *pending = made.release();
  });
}

crossdock_status crossdock_next_chunk(crossdock_dispatcher* dispatcher, crossdock_pending* pending,
                                      crossdock_dispatch_result* arrived, int64_t* first_expert,
                                      int64_t* last_expert) {
  return guarded([&] {
    auto& call = capi::pending_call<DispatchResult>(dispatcher, pending, "dispatch");
    capi::read_result(arrived);
    pointee("first_expert", first_expert);
    pointee("last_expert", last_expert);
    const std::optional<DispatchChunk> chunk = dispatcher->dispatcher.next_chunk(call);
    *first_expert = chunk ? chunk->first_expert : -1;
    *last_expert = chunk ? chunk->last_expert : -1;
    capi::write_struct(capi::kDispatchResult, arrived, capi::from_arrived(call.result()));
  });
}

crossdock_status crossdock_finish_dispatch(crossdock_dispatcher* dispatcher,
                                           crossdock_pending* pending,
                                           crossdock_dispatch_result* result) {
  return guarded([&] {
    auto& call = capi::pending_call<DispatchResult>(dispatcher, pending, "dispatch");
    const auto outputs = capi::read_result(result);
    capi::check_no_owner("rows", outputs.rows);
    capi::check_no_owner("row_scales", outputs.row_scales);
    capi::check_no_owner("row_weights", outputs.row_weights);
    const std::unique_ptr<crossdock_pending> finished(pending);
    DispatchResult made = dispatcher->dispatcher.finish(std::move(call));
    capi::write_struct(capi::kDispatchResult, result, crossdock_dispatch_result{});
    capi::set_result(result, std::move(made), {dispatcher->group, dispatcher->stream});
  });
}

crossdock_status crossdock_begin_combine(crossdock_dispatcher* dispatcher,
                                         const crossdock_plan* plan, const crossdock_tensor* y,
                                         const crossdock_output* given,
                                         crossdock_pending** pending) {
  return guarded([&] {
    const capi::Target target(dispatcher, plan, "combine");
    ConstTensorView from;
    TensorView to;
    std::unique_ptr<crossdock_pending> made;
    capi::convert(target.call(), [&] {
      pointee("pending", pending);
      made = std::make_unique<crossdock_pending>(target.owner);
      from = capi::to_view("y", y);
      if (given != nullptr) to = capi::given_output("out", given);
    });
    made->call = target.dispatcher().begin_combine(target.plan, from, to);
    *pending = made.release();
  });
}

crossdock_status crossdock_finish_combine(crossdock_dispatcher* dispatcher,
                                          crossdock_pending* pending, crossdock_output* out) {
  return guarded([&] {
    auto& call = capi::pending_call<OwnedTensor>(dispatcher, pending, "combine");
    capi::check_no_owner("out", pointee("out", out));
    const std::unique_ptr<crossdock_pending> finished(pending);
    OwnedTensor made = dispatcher->dispatcher.finish(std::move(call));
    *out = {};
    capi::set_result(out, std::move(made), {dispatcher->group, dispatcher->stream});
  });
}

void crossdock_pending_destroy(crossdock_pending* pending) {
  capi::destroy(pending);
}
