#include "crossdock/dispatcher.hpp"

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "crossdock/planner.hpp"
#include "dispatch/call.hpp"
#include "dispatch/host/host_path.hpp"
#include "dispatch/path.hpp"
#include "plan/plan_builder.hpp"

namespace crossdock {
namespace {

// The candidates that "auto" chose from; empty if they are the built-in strategies.
std::string candidates_text(std::string_view strategy_name, const StrategyList& candidates) {
  const std::vector<std::string> names = candidates.names();
  if (strategy_name != "auto" || names == built_in_strategies().names()) return {};
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ",") + name;
  return text;
}

ConstTensorView weights_of(const Plan& plan) {
  return plan.valid() ? plan.weights() : ConstTensorView{};
}

using MakeStrategy = std::function<std::unique_ptr<Strategy>(const DispatchConfig& config)>;

// A failure becomes the context's refusal.
PathContext make_context(Group& group, DispatchConfig config, const MakeStrategy& make,
                         const std::string& candidates = {}) {
  PathContext context{.group = group,
                      .config = std::make_shared<const DispatchConfig>(std::move(config)),
                      .strategy = nullptr,
                      .config_text = {}};
  context.refusal = refusal_of([&] {
    context.strategy = make(*context.config);
    CROSSDOCK_CHECK(context.strategy != nullptr, "a dispatcher needs a strategy, got none");
    check_config(*context.config, group.size());
    context.config_text = config_text(*context.config, context.strategy->name(), candidates);
  });
  return context;
}

}  // namespace

/// Once released, the caller's stream waits for the call before its plan and tensors are reused.
struct PendingWork {
  PendingWork() = default;
  ~PendingWork() {
    try {
      end();
    } catch (...) {  // the GPU is lost
    }
  }
  PendingWork(const PendingWork&) = delete;
  PendingWork& operator=(const PendingWork&) = delete;

  void end() {
    const std::shared_ptr<const void> mark = std::exchange(done, nullptr);
    if (mark) wait_for(mark);
  }
  /// Does nothing if the dispatcher is gone: its destructor has waited for the GPU.
  void wait_for(const std::shared_ptr<const void>& mark) const {
    if (const std::shared_ptr<Path> begun_by = path.lock()) begun_by->finish(mark);
  }

  std::weak_ptr<Path> path;
  Plan plan;
  std::vector<std::shared_ptr<const void>> owners;  // of the tensors
  std::shared_ptr<const void> done{};               // null: the call is done
  std::vector<PendingChunk> chunks{};               // of a dispatch
  size_t next_chunk = 0;
};

struct Dispatcher::Impl {
  explicit Impl(PathContext shared) : context(std::move(shared)), host_path(context) {}

  // The path that made the plan. Every path refuses another dispatcher's plan.
  Path& path_of(const Plan& plan) {
    if (device_path && (!plan.valid() || plan.device_data())) return *device_path;
    return host_path;
  }

  // Agrees on the ranks' GPUs, once. Collective.
  void learn_gpus(Device device) {
    if (knows_gpus || context.group.size() == 1) return;
    if constexpr (CROSSDOCK_HAS_CUDA) {
      const GpuRelation relation = agree_on_gpus(context, device);
      context.gpus_reach_each_other = relation.reach_each_other;
      context.spans_gpus = relation.are_several;
      context.ranks_share_gpus = relation.are_shared;
      context.group.log(
          LogLevel::kInfo,
          concat(relation.are_shared ? "some ranks share a GPU" : "every rank has its own GPU",
                 relation.reach_each_other ? "; GPUs reach each other's memory"
                                           : "; not all GPUs reach each other's memory"));
      context.group.log(LogLevel::kDebug, concat("GPU ", device.index));
    }
    knows_gpus = true;
  }

  // The path on a device, made on first use. A failure is this rank's refusal of the plan.
  Path& path_on(Device device) {
    if (device.is_cpu()) return host_path;
    learn_gpus(device);
    const std::optional<Error> refusal = refusal_of([&] {
      if (context.refusal) throw *context.refusal;
      if (device_path) return;
      std::unique_ptr<Path> made = context.strategy->make_device_path(context, device);
      made->set_options(context.options);
      device_path = std::move(made);
    });
    if (refusal) {
      context.group.agree(
          {.operation = "plan", .config = context.config_text, .refusal = &*refusal});
    }
    return *device_path;
  }

  template <typename AnyRouting>
  Plan plan(Path& path, const AnyRouting& routing) {
    Plan made = path.plan(routing);
    has_planned_on_device = has_planned_on_device || &path == device_path.get();
    return made;
  }

  // On a GPU the rows may not have moved yet: on_chunk can queue work behind the call.
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) {
    Path& path = path_of(plan);
    DispatchResult result = path.dispatch(plan, args, begun);
    if (!args.on_chunk || &path != device_path.get()) return result;
    run_agreed(context.group, [&] {
      args.on_chunk(result, {0, plan.num_local_experts()});
      agree_on_chunks(context.group, plan);
    });
    return result;
  }

  // Combine and its like; see Path::gather_sum.
  OwnedTensor gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args,
                         Begun* begun = nullptr) {
    return path_of(plan).gather_sum(operation, plan, args, begun);
  }

  // Makes a begun call keep its plan and the memory of `tensors` until it ends.
  template <typename Result>
  void keep(Pending<Result>& pending, const Plan& plan, const Begun& begun,
            std::initializer_list<ConstTensorView> tensors) {
    run_agreed(context.group, [&] {
      pending.work_ = std::make_shared<PendingWork>();
      pending.work_->done = begun.done;
      if (&path_of(plan) != device_path.get()) return;  // complete
      pending.work_->path = device_path;
      pending.work_->plan = plan;
      pending.work_->owners = device_path->owners_of(tensors);
    });
  }

  template <typename Result>
  static Result finish(Pending<Result>& pending) {
    if (pending.work_) pending.work_->end();
    return std::move(pending.result_);
  }

  PathContext context;
  HostPath host_path;
  std::shared_ptr<Path> device_path;
  bool knows_gpus = false;
  bool has_planned_on_device = false;  // on all ranks: their signals are connected
};

Dispatcher::Dispatcher(Group& group, DispatchConfig config, std::unique_ptr<Strategy> strategy)
    : impl_(std::make_unique<Impl>(
          make_context(group, std::move(config),
                       [&](const DispatchConfig& /*config*/) { return std::move(strategy); }))) {}

Dispatcher::Dispatcher(Group& group, DispatchConfig config, std::string_view strategy_name,
                       const StrategyList& candidates)
    : impl_(std::make_unique<Impl>(make_context(
          group, std::move(config),
          [&](const DispatchConfig& checked) {
            const StrategyChoice choice =
                resolve_strategy(strategy_name, checked, group.topology(), candidates);
            group.log(LogLevel::kInfo, concat("strategy ", choice.name, ": ", choice.reason));
            return candidates.make(choice.name);
          },
          candidates_text(strategy_name, candidates)))) {}

Dispatcher::~Dispatcher() = default;

const DispatchConfig& Dispatcher::config() const {
  return *impl_->context.config;
}

Group& Dispatcher::group() {
  return impl_->context.group;
}

const Strategy& Dispatcher::strategy() const {
  if (!impl_->context.strategy) throw *impl_->context.refusal;
  return *impl_->context.strategy;
}

void Dispatcher::set_device_options(const DeviceOptions& options) {
  impl_->context.options = options;
  if (impl_->device_path) impl_->device_path->set_options(options);
}

void Dispatcher::check() {
  group().check();
  if (impl_->device_path) impl_->device_path->check();
}

void Dispatcher::agree(const Proposal& proposal, Device device) {
  if (!device.is_cpu() && impl_->has_planned_on_device) {
    impl_->device_path->agree_on(proposal);
  } else {
    group().agree(proposal);
  }
}

OwnedTensor Dispatcher::all_reduce(const ConstTensorView& values) {
  return impl_->path_on(values.device).all_reduce(values);
}

Plan Dispatcher::plan(const Routing& routing) {
  return impl_->plan(impl_->path_on(routing.expert_ids.device), routing);
}

Plan Dispatcher::plan(const DenseRouting& routing) {
  return impl_->plan(impl_->path_on(routing.map.device), routing);
}

DispatchResult Dispatcher::dispatch(const Plan& plan, const DispatchArgs& args) {
  return impl_->dispatch(plan, args, nullptr);
}

OwnedTensor Dispatcher::combine(const Plan& plan, ConstTensorView y) {
  return combine(plan, y, {});
}

OwnedTensor Dispatcher::combine(const Plan& plan, ConstTensorView y, TensorView out) {
  return impl_->gather_sum("combine", plan, {.rows = y, .weights = weights_of(plan), .out = out});
}

OwnedTensor Dispatcher::combine_unweighted(const Plan& plan, ConstTensorView y) {
  return combine_unweighted(plan, y, {});
}

OwnedTensor Dispatcher::combine_unweighted(const Plan& plan, ConstTensorView y, TensorView out) {
  return impl_->gather_sum("combine_unweighted", plan, {.rows = y, .weights = {}, .out = out});
}

OwnedTensor Dispatcher::dispatch_backward(const Plan& plan, ConstTensorView grad_rows) {
  return dispatch_backward(plan, grad_rows, {});
}

OwnedTensor Dispatcher::dispatch_backward(const Plan& plan, ConstTensorView grad_rows,
                                          TensorView grad_x) {
  return impl_->gather_sum("dispatch_backward", plan,
                           {.rows = grad_rows, .weights = {}, .out = grad_x});
}

CombineBackwardResult Dispatcher::combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                   ConstTensorView y) {
  return combine_backward(plan, {.grad_out = grad_out, .y = y});
}

CombineBackwardResult Dispatcher::combine_backward(const Plan& plan,
                                                   const CombineBackwardArgs& args) {
  return impl_->path_of(plan).combine_backward(plan, args);
}

OwnedTensor Dispatcher::collect_routes(const Plan& plan, ConstTensorView rows) {
  return collect_routes(plan, rows, {});
}

OwnedTensor Dispatcher::collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) {
  return impl_->path_of(plan).collect_routes(plan, rows, routes);
}

OwnedTensor Dispatcher::allocate_rows(const Plan& plan, DType dtype) {
  group().check();
  check_plan(impl_->context, plan);
  return impl_->path_of(plan).allocate_rows(plan, dtype);
}

Pending<DispatchResult> Dispatcher::begin_dispatch(const Plan& plan, const DispatchArgs& args) {
  Begun begun;
  Pending<DispatchResult> pending;
  pending.result_ = impl_->dispatch(plan, args, &begun);
  impl_->keep(pending, plan, begun,
              {args.x, args.scales, args.rows, args.row_scales, args.row_weights});
  PendingWork& work = *pending.work_;
  work.chunks = std::move(begun.chunks);
  if (work.chunks.empty()) {
    work.chunks.push_back({.experts = {0, plan.num_local_experts()}, .done = work.done});
  }
  return pending;
}

Pending<OwnedTensor> Dispatcher::begin_combine(const Plan& plan, ConstTensorView y,
                                               TensorView out) {
  Begun begun;
  Pending<OwnedTensor> pending;
  pending.result_ = impl_->gather_sum("combine", plan,
                                      {.rows = y, .weights = weights_of(plan), .out = out}, &begun);
  impl_->keep(pending, plan, begun, {y, out});
  return pending;
}

std::optional<DispatchChunk> Dispatcher::next_chunk(Pending<DispatchResult>& pending) {
  PendingWork* const work = pending.work_.get();
  if (work == nullptr || work->next_chunk == work->chunks.size()) return std::nullopt;
  const PendingChunk& chunk = work->chunks[work->next_chunk++];
  if (chunk.done) work->wait_for(chunk.done);
  return chunk.experts;
}

DispatchResult Dispatcher::finish(Pending<DispatchResult> pending) {
  return impl_->finish(pending);
}

OwnedTensor Dispatcher::finish(Pending<OwnedTensor> pending) {
  return impl_->finish(pending);
}

}  // namespace crossdock
