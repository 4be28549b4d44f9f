// The way out: tokens to the rows of their experts, in one piece or chunk by chunk.
#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/device_path.hpp"
#include "dispatch/dispatch_args.hpp"
#include "dispatch/host/row_tensors.hpp"
#include "plan/expert_chunks.hpp"

namespace crossdock {

DispatchResult Dispatcher::dispatch(const Plan& plan, const DispatchArgs& args) {
  group_.check();  // before any memory is taken: peers may still use what a failed call had
  if (device_path_ && plan.device_data()) {
    DispatchResult queued = device_path_->dispatch(plan, args);
    if (!args.on_chunk) return queued;
    run_agreed(group_, [&] {
      args.on_chunk(queued, {0, plan.num_local_experts()});
      agree("dispatch", plan, {}, std::nullopt);
    });
    return queued;
  }
  DispatchResult result;
  std::vector<RowPart> parts;
  const std::optional<Error> refusal = refusal_of([&] {
    check_plan(plan);
    const Exchange local{group_, plan, 0, "dispatch", {}};
    const int64_t R = plan.num_rows();
    check_tensor("x", args.x, {plan.num_tokens(), config_->width});
    CROSSDOCK_CHECK(is_summable(args.x.dtype) || args.x.dtype == DType::kF8E4M3,
                    "x must be fp64, fp32, bf16, fp16 or fp8_e4m3, got ", name_of(args.x.dtype));
    if (const auto scales_shape = check_args(args, plan.num_tokens(), config_->width)) {
      check_tensor("scales", args.scales, *scales_shape);
    }
    const Shape shape{R, config_->width};
    if (args.rows.given()) {
      check_tensor("rows", args.rows, args.x.dtype, shape);
      result.rows.view = args.rows;
    } else {
      result.rows = strategy_->allocate_rows(local, args.x.dtype, shape);
    }
    parts.push_back(row_part(args.x, result.rows.view));
    if (args.scales.given()) {
      result.row_scales = output_or_new(group_.pool(), "row_scales", args.row_scales,
                                        args.scales.dtype, {R, args.scales.shape[1]});
      parts.push_back(row_part(args.scales, result.row_scales.view));
    }
    if (args.with_row_weights) {
      result.row_weights = group_.pool().take(plan.data().weight_dtype, {R});
    }
  });
  const uint64_t sequence = agree("dispatch", plan, call_text(args), refusal);
  const EventRecorder::Scope scope(group_.recorder(), "dispatch", sequence,
                                   plan.data().num_sent() * parts[0].row_bytes);
  run_agreed(group_, [&] {
    move_out({group_, plan, sequence, "dispatch", {}}, parts, args, result);
    // So that what the last on_chunk throws is everybody's. It may take longer than data to move.
    if (args.on_chunk) agree("dispatch", plan, {}, std::nullopt);
  });
  return result;
}

void Dispatcher::move_out(const Exchange& exchange, std::span<const RowPart> parts,
                          const DispatchArgs& args, const DispatchResult& result) {
  const PlanData& plan = exchange.plan.data();
  zero_pad_rows(plan, result.rows.view);
  if (args.scales.given()) zero_pad_rows(plan, result.row_scales.view);
  if (args.with_row_weights) {
    zero_pad_rows(plan, result.row_weights.view);
    strategy_->scatter_routes(exchange, exchange.plan.weights(), result.row_weights.view);
  }
  const std::vector<ExpertChunk> chunks = cut_experts(plan, args.num_chunks);
  std::optional<EventRecorder::Scope> travelling;
  const auto begin = [&](size_t i) {
    if (chunks.size() == 1 || i == chunks.size()) return;
    travelling.emplace(group_.recorder(), exchange.operation, exchange.sequence,
                       rows_sent(plan, chunks[i]) * parts[0].row_bytes, "chunk");
  };
  const auto arrived = [&](size_t i) {
    travelling.reset();
    const auto me = static_cast<size_t>(plan.rank);
    if (args.on_chunk)
      args.on_chunk(result, {chunks[i].first_expert[me], chunks[i].last_expert[me]});
    begin(i + 1);
  };
  begin(0);
  if (chunks.size() > 1) return strategy_->scatter_chunks(exchange, parts, chunks, arrived);
  strategy_->scatter(exchange, parts);
  arrived(0);
}

OwnedTensor Dispatcher::allocate_rows(const Plan& plan, DType dtype) {
  group_.check();
  check_plan(plan);
  if (device_path_ && plan.device_data()) return device_path_->allocate_rows(plan, dtype);
  return strategy_->allocate_rows({group_, plan, 0, "allocate_rows", {}}, dtype,
                                  {plan.num_rows(), config_->width});
}

}  // namespace crossdock
