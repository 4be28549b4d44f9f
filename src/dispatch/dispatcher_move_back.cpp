// The way back: rows to sums at their tokens; and the backward of a combine, which sends out first.
#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/device_path.hpp"
#include "dispatch/dispatch_args.hpp"
#include "dispatch/host/row_tensors.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

void check_summable(const char* name, const ConstTensorView& tensor) {
  CROSSDOCK_CHECK(is_summable(tensor.dtype), name, " must be fp64, fp32, bf16 or fp16, got ",
                  name_of(tensor.dtype));
}

// Weights are fp64 with fp64 rows, and fp32 with all others.
void check_weight_dtype(const Plan& plan, DType row_dtype) {
  const DType wanted = row_dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  CROSSDOCK_CHECK(plan.data().weight_dtype == wanted, "weights must be ", name_of(wanted),
                  " with rows of ", name_of(row_dtype), "; the plan was made with ",
                  name_of(plan.data().weight_dtype));
}

}  // namespace

OwnedTensor Dispatcher::sum_rows(const char* operation, const Plan& plan,
                                 const GatherSumArgs& args) {
  if (device_path_ && plan.device_data()) return device_path_->sum_rows(operation, plan, args);
  OwnedTensor out;
  const bool weighted = args.weights.given();
  const std::optional<Error> refusal = refusal_of([&] {
    check_plan(plan);
    check_tensor("rows", args.rows, {plan.num_rows(), config_->width});
    check_summable("rows", args.rows);
    if (weighted) check_weight_dtype(plan, args.rows.dtype);
    check_outputs(args);
    out = output_or_new(group_.pool(), "out", args.out, args.rows.dtype,
                        {plan.num_tokens(), config_->width});
  });
  const uint64_t sequence = agree(
      operation, plan, concat("dtype=", name_of(args.rows.dtype), ";weighted=", weighted), refusal);
  const EventRecorder::Scope scope(group_.recorder(), operation, sequence,
                                   plan.data().num_received() * args.rows.row_bytes());
  run_agreed(group_, [&] {
    const Exchange exchange{group_, plan, sequence, operation, {}};
    const GatherSumArgs sum{.rows = args.rows, .weights = args.weights, .out = out.view};
    if (config_->partial_sums) {
      strategy_->gather_partial_sums(exchange, sum);
    } else {
      strategy_->gather_sum(exchange, sum);
    }
  });
  return out;
}

OwnedTensor Dispatcher::combine(const Plan& plan, ConstTensorView y, TensorView out) {
  const ConstTensorView weights = plan.valid() ? plan.weights() : ConstTensorView{};
  return sum_rows("combine", plan, {.rows = y, .weights = weights, .out = out});
}

OwnedTensor Dispatcher::combine_unweighted(const Plan& plan, ConstTensorView y, TensorView out) {
  return sum_rows("combine_unweighted", plan, {.rows = y, .weights = {}, .out = out});
}

OwnedTensor Dispatcher::dispatch_backward(const Plan& plan, ConstTensorView grad_rows,
                                          TensorView grad_x) {
  return sum_rows("dispatch_backward", plan, {.rows = grad_rows, .weights = {}, .out = grad_x});
}

CombineBackwardResult Dispatcher::combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                   ConstTensorView y) {
  group_.check();  // before any memory is taken, as in dispatch
  if (device_path_ && plan.device_data()) return device_path_->combine_backward(plan, grad_out, y);
  CombineBackwardResult result;
  OwnedTensor row_weights;
  OwnedTensor row_grads;
  const std::optional<Error> refusal = refusal_of([&] {
    check_plan(plan);
    const PlanData& data = plan.data();
    check_tensor("grad_out", grad_out, {data.T, config_->width});
    check_tensor("y", y, {data.num_rows(), config_->width});
    check_summable("grad_out", grad_out);
    CROSSDOCK_CHECK(y.dtype == grad_out.dtype, "y and grad_out must have one dtype, got ",
                    name_of(y.dtype), " and ", name_of(grad_out.dtype));
    check_weight_dtype(plan, y.dtype);
    const Exchange local{group_, plan, 0, "combine_backward", {}};
    result.grad_rows = strategy_->allocate_rows(local, y.dtype, y.shape);
    result.grad_weights = group_.pool().take(data.weight_dtype, {data.T, data.K});
    row_weights = group_.pool().take(data.weight_dtype, {data.num_rows()});
    row_grads = group_.pool().take(data.weight_dtype, {data.num_rows()});
  });
  const uint64_t sequence =
      agree("combine_backward", plan, concat("dtype=", name_of(grad_out.dtype)), refusal);
  const TensorView& grad_rows = result.grad_rows.view;
  const EventRecorder::Scope scope(group_.recorder(), "combine_backward", sequence,
                                   plan.data().num_sent() * grad_rows.row_bytes());
  run_agreed(group_, [&] {
    const Exchange exchange{group_, plan, sequence, "combine_backward", {}};
    const RowPart part = row_part(grad_out, grad_rows);
    zero_pad_rows(plan.data(), grad_rows);
    strategy_->scatter(exchange, {&part, 1});
    zero_pad_rows(plan.data(), row_weights.view);
    strategy_->scatter_routes(exchange, plan.weights(), row_weights.view);
    ops::sum_rows_backward({.y = static_cast<const std::byte*>(y.data),
                            .grad = static_cast<std::byte*>(grad_rows.data),
                            .weights = row_weights.view.data,
                            .grad_weights = row_grads.view.data,
                            .R = plan.num_rows(),
                            .D = config_->width,
                            .dtype = y.dtype},
                           *group_.threads());
    zero(result.grad_weights.view);
    strategy_->gather_routes(exchange, row_grads.view, result.grad_weights.view);
  });
  return result;
}

OwnedTensor Dispatcher::collect_routes(const Plan& plan, ConstTensorView rows) {
  if (device_path_ && plan.device_data()) return device_path_->collect_routes(plan, rows);
  OwnedTensor routes;
  const std::optional<Error> refusal = refusal_of([&] {
    check_plan(plan);
    check_tensor("rows", rows, {plan.num_rows()});
    CROSSDOCK_CHECK(rows.dtype == DType::kF32 || rows.dtype == DType::kF64,
                    "rows must be fp32 or fp64, got ", name_of(rows.dtype));
    routes = group_.pool().take(rows.dtype, {plan.num_tokens(), config_->top_k});
  });
  const uint64_t sequence =
      agree("collect_routes", plan, concat("dtype=", name_of(rows.dtype)), refusal);
  const EventRecorder::Scope scope(group_.recorder(), "collect_routes", sequence,
                                   plan.data().num_received() * size_of(rows.dtype));
  run_agreed(group_, [&] {
    zero(routes.view);
    strategy_->gather_routes({group_, plan, sequence, "collect_routes", {}}, rows, routes.view);
  });
  return routes;
}

}  // namespace crossdock
