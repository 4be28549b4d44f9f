#include "dispatch/host/host_path.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/row_tensors.hpp"
#include "ops/sum_rows.hpp"
#include "plan/capacity.hpp"
#include "plan/expert_chunks.hpp"
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
    state = context.strategy->prepare({group, bare, agreement.sequence, "plan", {}});
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

HostPath::HostPath(PathContext context) : FramedPath(std::move(context), Traits{}) {}

void HostPath::check_tensor(const char* name, const ConstTensorView& tensor,
                            const Shape& shape) const {
  crossdock::check_tensor(name, tensor, shape);
}

OwnedTensor HostPath::take(DType dtype, const Shape& shape) {
  return group().pool().take(dtype, shape);
}

OwnedTensor HostPath::output_or_new(const char* name, const TensorView& given, DType dtype,
                                    const Shape& shape) {
  if (!given.given()) return take(dtype, shape);
  crossdock::check_tensor(name, given, dtype, shape);
  return {.view = given, .owner = nullptr};
}

OwnedTensor HostPath::take_rows(const char* operation, const Plan& plan, DType dtype) {
  return strategy().allocate_rows({group(), plan, 0, operation, {}}, dtype,
                                  {plan.num_rows(), config().width});
}

OwnedTensor HostPath::allocate_rows(const Plan& plan, DType dtype) {
  return take_rows("allocate_rows", plan, dtype);
}

ReadyCall HostPath::ready_dispatch(const Plan& plan, const DispatchArgs& args,
                                   const DispatchResult& result) {
  std::vector<RowPart> parts{row_part(args.x, result.rows.view)};
  if (args.scales.given()) parts.push_back(row_part(args.scales, result.row_scales.view));
  const int64_t num_bytes = plan.data().num_sent() * parts[0].row_bytes;
  return {.move =
              [this, &plan, &args, &result, parts = std::move(parts)](uint64_t sequence) {
                scatter_tokens({group(), plan, sequence, "dispatch", {}}, parts, args, result);
                if (args.on_chunk) agree_on_chunks(plan);
              },
          .num_bytes = num_bytes};
}

// Scatters tokens to the rows of their experts, at once or chunk by chunk.
void HostPath::scatter_tokens(const Exchange& exchange, std::span<const RowPart> parts,
                              const DispatchArgs& args, const DispatchResult& result) {
  const PlanData& plan = exchange.plan.data();
  zero_pad_rows(plan, result.rows.view);
  if (args.scales.given()) zero_pad_rows(plan, result.row_scales.view);
  if (args.with_row_weights) {
    zero_pad_rows(plan, result.row_weights.view);
    strategy().scatter_routes(exchange, exchange.plan.weights(), result.row_weights.view);
  }
  const std::vector<ExpertChunk> chunks = split_experts(plan, args.num_chunks);
  std::optional<EventRecorder::Scope> recorded;  // of the current chunk
  const auto begin = [&](size_t i) {
    if (chunks.size() == 1 || i == chunks.size()) return;
    recorded.emplace(group().recorder(), exchange.operation, exchange.sequence,
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
  if (chunks.size() > 1) return strategy().scatter_chunks(exchange, parts, chunks, arrived);
  strategy().scatter(exchange, parts);
  arrived(0);
}

ReadyCall HostPath::ready_gather_sum(const char* operation, const Plan& plan,
                                     const GatherSumArgs& args) {
  return {.move =
              [this, operation, &plan, args](uint64_t sequence) {
                const Exchange exchange{group(), plan, sequence, operation, {}};
                if (config().partial_sums != PartialSums::kNone) {
                  strategy().gather_partial_sums(exchange, args);
                } else {
                  strategy().gather_sum(exchange, args);
                }
              },
          .num_bytes = plan.data().num_received() * args.rows.row_bytes()};
}

// Sends grad_out and the weights to the rows, computes both gradients there and returns the weight
// gradients.
ReadyCall HostPath::ready_combine_backward(const Plan& plan, const GradientTensors& tensors) {
  const PlanData& data = plan.data();
  const OwnedTensor row_weights = take(data.weight_dtype, {data.num_rows()});
  const OwnedTensor row_grads = take(data.weight_dtype, {data.num_rows()});
  const auto move = [this, &plan, tensors, row_weights, row_grads](uint64_t sequence) {
    const Exchange exchange{group(), plan, sequence, "combine_backward", {}};
    const RowPart part = row_part(tensors.grad_out, tensors.grad_rows);
    zero_pad_rows(plan.data(), tensors.grad_rows);
    strategy().scatter(exchange, {&part, 1});
    zero_pad_rows(plan.data(), row_weights.view);
    strategy().scatter_routes(exchange, plan.weights(), row_weights.view);
    ops::sum_rows_backward({.y = static_cast<const std::byte*>(tensors.y.data),
                            .grad = static_cast<std::byte*>(tensors.grad_rows.data),
                            .weights = row_weights.view.data,
                            .grad_weights = row_grads.view.data,
                            .R = plan.num_rows(),
                            .D = config().width,
                            .dtype = tensors.y.dtype},
                           *group().threads());
    zero(tensors.grad_weights);
    strategy().gather_routes(exchange, row_grads.view, tensors.grad_weights);
  };
  return {.move = move, .num_bytes = data.num_sent() * tensors.grad_rows.row_bytes()};
}

ReadyCall HostPath::ready_collect_routes(const Plan& plan, const ConstTensorView& rows,
                                         const TensorView& routes) {
  return {
      .move =
          [this, &plan, rows, routes](uint64_t sequence) {
            zero(routes);
            strategy().gather_routes({group(), plan, sequence, "collect_routes", {}}, rows, routes);
          },
      .num_bytes = plan.data().num_received() * size_of(rows.dtype)};
}

}  // namespace crossdock
