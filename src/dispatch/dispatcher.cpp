#include "crossdock/dispatcher.hpp"

#include <cstring>
#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/strategy_cost.hpp"
#include "dispatch/capacity.hpp"
#include "dispatch/config_check.hpp"
#include "dispatch/device_path.hpp"
#include "dispatch/dispatch_args.hpp"
#include "dispatch/expert_chunks.hpp"
#include "dispatch/plan_builder.hpp"
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

void zero_rows(const PlanData& plan, const TensorView& rows) {
  for (const RowRange& pad : pad_rows(plan)) {
    std::memset(static_cast<std::byte*>(rows.data) + pad.first * rows.row_bytes(), 0,
                static_cast<size_t>(pad.count * rows.row_bytes()));
  }
}

void zero(const TensorView& tensor) {
  if (tensor.num_bytes() > 0) {
    std::memset(tensor.data, 0, static_cast<size_t>(tensor.num_bytes()));
  }
}

// The caller's output, or memory of the group's pool.
OwnedTensor output_or_new(BufferPool& pool, const char* name, const TensorView& given, DType dtype,
                          const Shape& shape) {
  if (!given.given()) return pool.take(dtype, shape);
  check_tensor(name, given, dtype, shape);
  return {.view = given, .owner = nullptr};
}

RowPart row_part(const ConstTensorView& tokens, const TensorView& rows) {
  return {.tokens = static_cast<const std::byte*>(tokens.data),
          .rows = static_cast<std::byte*>(rows.data),
          .row_bytes = rows.row_bytes()};
}

}  // namespace

Dispatcher::Dispatcher(Group& group, DispatchConfig config, std::unique_ptr<Strategy> strategy)
    : group_(group),
      config_(std::make_shared<const DispatchConfig>(std::move(config))),
      strategy_(std::move(strategy)) {
  flaw_ = refusal_of([&] {
    CROSSDOCK_CHECK(strategy_ != nullptr, "a dispatcher needs a strategy, got none");
    check_config(*config_, group_.size());
    config_text_ = config_text(*config_, strategy_->name());
  });
}

Dispatcher::Dispatcher(Group& group, DispatchConfig config, std::string_view strategy_name)
    : group_(group), config_(std::make_shared<const DispatchConfig>(std::move(config))) {
  flaw_ = refusal_of([&] {
    strategy_ = make_strategy(resolve_strategy(strategy_name, *config_, group_.topology()));
    check_config(*config_, group_.size());
    config_text_ = config_text(*config_, strategy_->name());
  });
}

Dispatcher::~Dispatcher() = default;

const Strategy& Dispatcher::strategy() const {
  if (!strategy_) throw *flaw_;
  return *strategy_;
}

void Dispatcher::check_plan(const Plan& plan) const {
  CROSSDOCK_CHECK(plan.valid(), "the plan is empty; make one with Dispatcher::plan");
  CROSSDOCK_CHECK(plan.data().config == config_,
                  "the plan was made by another dispatcher; use the one that made it");
}

uint64_t Dispatcher::agree(const char* operation, const Plan& plan, std::string call_text,
                           const std::optional<Error>& refusal) {
  return group_
      .agree({.operation = operation,
              .subject = plan.valid() ? plan.id() : 0,
              .config = std::move(call_text),
              .body = {},
              .rejection = refusal ? &*refusal : nullptr})
      .sequence;
}

void Dispatcher::set_device_options(const DeviceOptions& options) {
  device_options_ = options;
  if (device_path_) device_path_->set_options(options);
}

void Dispatcher::check() {
  group_.check();
  if (device_path_) device_path_->check();
}

// Where a routing is planned: where it is, or where its strategy takes host tensors.
Device Dispatcher::planning_device(const ConstTensorView& routes, const ConstTensorView& weights) {
  if (!routes.device.is_cpu() || !strategy_) return routes.device;
  const std::optional<Device> staging = strategy_->device_for_host_tensors();
  const bool stays = weights.dtype == DType::kF64 || config_->partial_sums;
  return staging && !stays ? *staging : routes.device;
}

// A rank that cannot make it refuses the plan of all.
DevicePath& Dispatcher::device_path(Device device) {
  const std::optional<Error> refusal = refusal_of([&] {
    if (flaw_) throw *flaw_;
    if (device_path_) return;
    const auto make = strategy_->device_for_host_tensors() ? make_staged_path : make_device_path;
    device_path_ = make({.group = group_,
                         .config = config_,
                         .config_text = config_text_,
                         .strategy_name = std::string(strategy_->name()),
                         .options = device_options_},
                        device);
    device_path_->set_options(device_options_);
  });
  if (refusal) agree("plan", {}, config_text_, refusal);
  return *device_path_;
}

Plan Dispatcher::plan(const Routing& routing) {
  const auto on_host = [&](const Routing& host) {
    return plan_routes([&] { return read_routes(host, *config_, group_.pool()); });
  };
  const Device device = planning_device(routing.expert_ids, routing.weights);
  return device.is_cpu() ? on_host(routing) : device_path(device).plan(routing, on_host);
}

Plan Dispatcher::plan(const DenseRouting& routing) {
  const auto on_host = [&](const DenseRouting& host) {
    return plan_routes([&] { return read_routes(host, *config_, group_.pool()); });
  };
  const Device device = planning_device(routing.map, routing.weights);
  return device.is_cpu() ? on_host(routing) : device_path(device).plan(routing, on_host);
}

Plan Dispatcher::plan_routes(const std::function<LocalRoutes()>& read_routes) {
  LocalRoutes routes;
  std::vector<int64_t> packed;
  const std::optional<Error> refusal = refusal_of([&] {
    if (flaw_) throw *flaw_;
    routes = read_routes();
    drop_beyond_capacity(*config_, routes);
    packed = pack_counts(routes);
  });
  const Agreement agreement =
      group_.agree({.operation = "plan",
                    .config = concat(config_text_, ";weights=", name_of(routes.weight_dtype)),
                    .body = std::as_bytes(std::span(packed)),
                    .rejection = refusal ? &*refusal : nullptr});

  const EventRecorder::Scope scope(group_.recorder(), "plan", agreement.sequence);
  auto data = std::make_shared<PlanData>();
  run_agreed(group_, [&] {
    PlanInputs inputs{.config = config_,
                      .P = group_.size(),
                      .rank = group_.rank(),
                      .id = agreement.sequence,
                      .packed_counts = {}};
    for (int rank = 0; rank < inputs.P; ++rank) {
      const std::span<const std::byte> body = agreement.body(rank);
      inputs.packed_counts.emplace_back(reinterpret_cast<const int64_t*>(body.data()),
                                        body.size() / sizeof(int64_t));
    }
    *data = build_plan(inputs, std::move(routes));
  });
  check_max_rows(*data);  // alike on all ranks: the group stays usable
  std::shared_ptr<const void> state;
  run_agreed(group_, [&] {
    const Plan bare(data, nullptr);
    state = strategy_->prepare({group_, bare, agreement.sequence, "plan", {}});
  });
  return {std::move(data), std::move(state)};
}

DispatchResult Dispatcher::dispatch(const Plan& plan, const DispatchArgs& args) {
  if (device_path_ && plan.device_data()) {
    DispatchResult queued = device_path_->dispatch(plan, args);
    run_agreed(group_, [&] {
      if (args.on_chunk) args.on_chunk(queued, {0, plan.num_local_experts()});
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
  });
  return result;
}

void Dispatcher::move_out(const Exchange& exchange, std::span<const RowPart> parts,
                          const DispatchArgs& args, const DispatchResult& result) {
  const PlanData& plan = exchange.plan.data();
  zero_rows(plan, result.rows.view);
  if (args.scales.given()) zero_rows(plan, result.row_scales.view);
  if (args.with_row_weights) {
    zero_rows(plan, result.row_weights.view);
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
    zero_rows(plan.data(), grad_rows);
    strategy_->scatter(exchange, {&part, 1});
    zero_rows(plan.data(), row_weights.view);
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

OwnedTensor Dispatcher::allocate_rows(const Plan& plan, DType dtype) {
  check_plan(plan);
  if (device_path_ && plan.device_data()) return device_path_->allocate_rows(plan, dtype);
  return strategy_->allocate_rows({group_, plan, 0, "allocate_rows", {}}, dtype,
                                  {plan.num_rows(), config_->width});
}

}  // namespace crossdock
