#include "dispatch/host/host_path.hpp"

#include <utility>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/call.hpp"
#include "dispatch/host/peer_rows.hpp"
#include "ops/sum_rows.hpp"
#include "plan/local_routes.hpp"
#include "plan/placement.hpp"
#include "plan/plan_builder.hpp"

namespace crossdock {
namespace {

template <typename AnyRouting>
Plan make_plan(const PathContext& context, const AnyRouting& routing) {
  Group& group = context.group;
  LocalRoutes routes;
  std::vector<int64_t> packed;
  const std::optional<Error> refusal = refusal_of([&] {
    if (context.refusal) throw *context.refusal;
    routes = read_routes(routing, *context.config, group.pool());
    drop_beyond_capacity(*context.config, routes);
    packed = pack_counts(routes);
  });
  const Agreement agreement =
      group.agree({.operation = "plan",
                   .config = concat(context.config_text, ";weights=", name_of(routes.weight_dtype)),
                   .body = std::as_bytes(std::span(packed)),
                   .refusal = as_refusal(refusal)});

  const EventRecorder::Scope scope(group.recorder(), "plan", agreement.sequence);
  auto data = std::make_shared<PlanData>();
  run_agreed(group, [&] {
    PlanInputs inputs{.config = context.config,
                      .P = group.size(),
                      .rank = group.rank(),
                      .id = agreement.sequence,
                      .packed_counts = {}};
    for (int rank = 0; rank < inputs.P; ++rank) {
      const std::span<const std::byte> body = agreement.body(rank);
      inputs.packed_counts.emplace_back(reinterpret_cast<const int64_t*>(body.data()),
                                        body.size() / sizeof(int64_t));
    }
    widen_slots(agreed_slots(inputs), routes, group.pool());
    *data = build_plan(inputs, std::move(routes));
  });
  check_max_rows(*data);  // throws on every rank or on none: the group stays usable
  std::shared_ptr<const void> state;
  run_agreed(group, [&] {
    const Plan bare(data, nullptr);
    state = context.strategy->prepare({group, bare, agreement.sequence, "plan"});
  });
  return {std::move(data), std::move(state)};
}

}  // namespace

Plan make_host_plan(const PathContext& context, const Routing& routing) {
  return make_plan(context, routing);
}

Plan make_host_plan(const PathContext& context, const DenseRouting& routing) {
  return make_plan(context, routing);
}

HostPath::HostPath(PathContext context) : context_(std::move(context)) {}

OwnedTensor HostPath::take_rows(const char* operation, const Plan& plan, DType dtype) const {
  return strategy().allocate_rows({group(), plan, 0, operation}, dtype,
                                  {plan.num_rows(), context_.config->width});
}

OwnedTensor HostPath::allocate_rows(const Plan& plan, DType dtype) {
  return take_rows("allocate_rows", plan, dtype);
}

DispatchResult HostPath::dispatch(const Plan& plan, const DispatchArgs& args, Begun* /*begun*/) {
  HostCall call(context_, {.operation = "dispatch", .plan = &plan, .text = call_text(args)});
  DispatchResult result;
  std::vector<RowPart> parts;
  call.prepare([&] {
    check_args(plan, args, {});
    result.rows = args.rows.given() ? OwnedTensor{.view = args.rows, .owner = nullptr}
                                    : take_rows("dispatch", plan, args.x.dtype);
    take_outputs(group().pool(), plan, args, result);
    parts.push_back(row_part(args.x, result.rows.view));
    if (args.scales.given()) parts.push_back(row_part(args.scales, result.row_scales.view));
  });
  const uint64_t sequence = call.agree();
  call.move(plan.data().num_sent() * parts[0].row_bytes, [&] {
    scatter_tokens({group(), plan, sequence, "dispatch"}, parts, args, result);
    if (args.on_chunk) agree_on_chunks(group(), plan);
  });
  return result;
}

// Scatters tokens to the rows of their experts, at once or chunk by chunk.
void HostPath::scatter_tokens(const StrategyCall& strategy_call, std::span<const RowPart> parts,
                              const DispatchArgs& args, const DispatchResult& result) {
  const PlanData& plan = strategy_call.plan.data();
  zero_pad_rows(plan, result.rows.view);
  if (args.scales.given()) zero_pad_rows(plan, result.row_scales.view);
  if (args.with_row_weights) {
    zero_pad_rows(plan, result.row_weights.view);
    strategy().scatter_routes(strategy_call, strategy_call.plan.weights(), result.row_weights.view);
  }
  const std::vector<ExpertChunk> chunks = split_experts(plan, args.num_chunks);
  std::optional<EventRecorder::Scope> recorded;  // of the current chunk
  const auto begin = [&](size_t i) {
    if (chunks.size() == 1 || i == chunks.size()) return;
    recorded.emplace(group().recorder(), strategy_call.operation, strategy_call.sequence,
                     rows_sent(plan, chunks[i]) * parts[0].row_bytes, "chunk");
  };
  const auto arrived = [&](size_t i) {
    recorded.reset();
    const auto me = static_cast<size_t>(plan.rank);
    if (args.on_chunk)
      args.on_chunk(result, {chunks[i].first_expert[me], chunks[i].last_expert[me]});
    begin(i + 1);
  };
  begin(0);
  if (chunks.size() > 1) return strategy().scatter_chunks(strategy_call, parts, chunks, arrived);
  strategy().scatter(strategy_call, parts);
  arrived(0);
}

OwnedTensor HostPath::gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args,
                                 Begun* /*begun*/) {
  HostCall call(context_, {.operation = operation, .plan = &plan, .text = call_text(args)});
  OwnedTensor out;
  call.prepare([&] {
    check_args(plan, args, {});
    out = output_or_new(group().pool(), args.out, args.rows.dtype,
                        {plan.num_tokens(), context_.config->width});
  });
  const uint64_t sequence = call.agree();
  call.move(plan.data().num_received() * args.rows.row_bytes(), [&] {
    const StrategyCall strategy_call{group(), plan, sequence, operation};
    const GatherSumArgs sum{.rows = args.rows, .weights = args.weights, .out = out.view};
    if (context_.config->partial_sums != PartialSums::kNone) {
      strategy().gather_partial_sums(strategy_call, sum);
    } else {
      strategy().gather_sum(strategy_call, sum);
    }
  });
  return out;
}

// Sends grad_out and the weights to the rows, computes both gradients there and returns the weight
// gradients.
CombineBackwardResult HostPath::combine_backward(const Plan& plan,
                                                 const CombineBackwardArgs& args) {
  HostCall call(context_,
                {.operation = "combine_backward", .plan = &plan, .text = call_text(args)});
  CombineBackwardResult result;
  OwnedTensor row_weights;
  OwnedTensor row_grads;
  call.prepare([&] {
    check_args(plan, args, {});
    const DType weight_dtype = plan.data().weight_dtype;
    BufferPool& pool = group().pool();
    result.grad_rows = args.grad_rows.given()
                           ? OwnedTensor{.view = args.grad_rows, .owner = nullptr}
                           : take_rows("combine_backward", plan, args.y.dtype);
    result.grad_weights =
        output_or_new(pool, args.grad_weights, weight_dtype, {plan.num_tokens(), plan.data().K});
    row_weights = pool.take(weight_dtype, {plan.num_rows()});
    row_grads = pool.take(weight_dtype, {plan.num_rows()});
  });
  const uint64_t sequence = call.agree();
  const TensorView& grad_rows = result.grad_rows.view;
  call.move(plan.data().num_sent() * grad_rows.row_bytes(), [&] {
    const StrategyCall strategy_call{group(), plan, sequence, "combine_backward"};
    const RowPart part = row_part(args.grad_out, grad_rows);
    zero_pad_rows(plan.data(), grad_rows);
    strategy().scatter(strategy_call, {&part, 1});
    zero_pad_rows(plan.data(), row_weights.view);
    strategy().scatter_routes(strategy_call, plan.weights(), row_weights.view);
    ops::sum_rows_backward({.y = static_cast<const std::byte*>(args.y.data),
                            .grad = static_cast<std::byte*>(grad_rows.data),
                            .weights = row_weights.view.data,
                            .grad_weights = row_grads.view.data,
                            .R = plan.num_rows(),
                            .D = context_.config->width,
                            .dtype = args.y.dtype},
                           *group().threads());
    zero(result.grad_weights.view);
    strategy().gather_routes(strategy_call, row_grads.view, result.grad_weights.view);
  });
  return result;
}

OwnedTensor HostPath::collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) {
  HostCall call(context_,
                {.operation = "collect_routes", .plan = &plan, .text = call_text_of_routes(rows)});
  OwnedTensor result;
  call.prepare([&] {
    check_collected(plan, rows, routes, {});
    result = output_or_new(group().pool(), routes, rows.dtype, {plan.num_tokens(), plan.data().K});
  });
  const uint64_t sequence = call.agree();
  call.move(plan.data().num_received() * size_of(rows.dtype), [&] {
    zero(result.view);
    strategy().gather_routes({group(), plan, sequence, "collect_routes"}, rows, result.view);
  });
  return result;
}

}  // namespace crossdock
