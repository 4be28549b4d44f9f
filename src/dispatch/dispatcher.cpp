#include "crossdock/dispatcher.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/planner.hpp"
#include "dispatch/device_path.hpp"
#include "plan/capacity.hpp"
#include "plan/config_check.hpp"
#include "plan/plan_builder.hpp"

namespace crossdock {

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

}  // namespace crossdock
