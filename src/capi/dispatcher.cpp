#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"

namespace crossdock::capi {
namespace {

constexpr const char* kPlanInfo = "crossdock_plan_info";

// `check_outputs` throws if the caller's outputs cannot be used; all ranks then refuse the call.
template <typename CheckOutputs>
std::unique_ptr<crossdock_plan> make_plan(crossdock_dispatcher* dispatcher,
                                          const crossdock_routing* routing,
                                          const CheckOutputs& check_outputs) {
  crossdock_dispatcher& owner = handle("dispatcher", dispatcher);
  Dispatcher& planner = owner.dispatcher;
  ConstTensorView routes;
  ConstTensorView weights;
  ConstTensorView mask;
  bool is_dense = false;
  std::unique_ptr<crossdock_plan> made;
  convert(call_of(planner, owner.group->open(), "plan", Plan()), [&] {
    throw_if_set(owner.refusal);
    check_outputs();
    const auto given = read_struct("crossdock_routing", routing);
    is_dense = given.map.num_dims != 0;
    CROSSDOCK_CHECK(!is_dense || given.expert_ids.num_dims == 0,
                    "crossdock_routing: give either expert_ids or map, not both");
    routes = is_dense ? to_view("map", given.map) : to_view("expert_ids", given.expert_ids);
    weights = to_view("weights", given.weights);
    mask = to_view("mask", given.mask);
    made = std::make_unique<crossdock_plan>(owner.group);
  });
  made->plan = is_dense
                   ? planner.plan(DenseRouting{.map = routes, .weights = weights, .mask = mask})
                   : planner.plan(Routing{.expert_ids = routes, .weights = weights, .mask = mask});
  return made;
}

void describe(const Plan& plan, crossdock_plan_info* info) {
  const Segments segments = plan.segments();
  crossdock_plan_info value = {};
  value.id = plan.id();
  value.num_tokens = plan.num_tokens();
  value.capacity_rows = plan.capacity_rows();
  value.num_local_experts = plan.num_local_experts();
  value.segment_starts = segments.starts;
  value.segment_counts = segments.counts;
  value.weights = from_view(plan.weights());
  value.device_kind = static_cast<int32_t>(plan.device().kind);
  value.device_index = plan.device().index;
  write_struct(kPlanInfo, info, value);
}

}  // namespace
}  // namespace crossdock::capi

using namespace crossdock;
using capi::guarded;
using capi::handle;
using capi::pointee;

crossdock_status crossdock_dispatcher_create(crossdock_group* group,
                                             const crossdock_dispatch_config* config,
                                             crossdock_dispatcher** dispatcher) {
  return guarded([&] {
    const capi::GroupPtr& members = handle("group", group).shared;
    crossdock_dispatcher*& made = pointee("dispatcher", dispatcher);
    const auto given = capi::read_struct("crossdock_dispatch_config", config);
    const char* strategy = given.strategy != nullptr ? given.strategy : "auto";
    std::optional<Error> refusal;
    const DispatchConfig converted = capi::to_config(given, given.num_experts, refusal);
    made = new crossdock_dispatcher(members, converted, strategy);
    made->refusal = std::move(refusal);
  });
}

void crossdock_dispatcher_destroy(crossdock_dispatcher* dispatcher) {
  capi::destroy(dispatcher);
}

crossdock_status crossdock_dispatcher_strategy(const crossdock_dispatcher* dispatcher,
                                               const char** name) {
  return guarded([&] {
    const crossdock_dispatcher& asked = handle("dispatcher", dispatcher);
    const char*& found = pointee("name", name);
    if (asked.strategy.empty()) asked.strategy = asked.dispatcher.strategy().name();
    found = asked.strategy.c_str();
  });
}

crossdock_status crossdock_set_device_options(crossdock_dispatcher* dispatcher,
                                              const crossdock_device_options* options) {
  return guarded([&] {
    crossdock_dispatcher& changed = handle("dispatcher", dispatcher);
    const auto given = capi::read_struct("crossdock_device_options", options);
    changed.dispatcher.set_device_options({.stream = {given.stream},
                                           .max_sms = given.max_sms,
                                           .max_begun_sms = given.max_begun_sms,
                                           .nccl_comm = given.nccl_comm});
    changed.stream = {given.stream};
  });
}

crossdock_status crossdock_dispatcher_check(crossdock_dispatcher* dispatcher) {
  return guarded([&] { handle("dispatcher", dispatcher).dispatcher.check(); });
}

crossdock_status crossdock_plan_create(crossdock_dispatcher* dispatcher,
                                       const crossdock_routing* routing, crossdock_plan** plan) {
  return guarded([&] {
    *plan = capi::make_plan(dispatcher, routing, [&] { pointee("plan", plan); }).release();
  });
}

crossdock_status crossdock_plan_create_described(crossdock_dispatcher* dispatcher,
                                                 const crossdock_routing* routing,
                                                 crossdock_plan_info* info,
                                                 int64_t* rows_per_expert, crossdock_plan** plan) {
  return guarded([&] {
    std::unique_ptr<crossdock_plan> made = capi::make_plan(dispatcher, routing, [&] {
      pointee("plan", plan);
      capi::check_struct(capi::kPlanInfo, info);
    });
    capi::describe(made->plan, info);
    if (rows_per_expert != nullptr && made->plan.device().is_cpu()) {
      const int64_t* starts = made->plan.segments().starts;
      for (int64_t e = 0; e < made->plan.num_local_experts(); ++e) {
        rows_per_expert[e] = starts[e + 1] - starts[e];
      }
    }
    *plan = made.release();
  });
}

void crossdock_plan_destroy(crossdock_plan* plan) {
  capi::destroy(plan);
}

crossdock_status crossdock_plan_describe(const crossdock_plan* plan, crossdock_plan_info* info) {
  return guarded([&] { capi::describe(handle("plan", plan).plan, info); });
}

crossdock_status crossdock_plan_num_rows(const crossdock_plan* plan, int64_t* num_rows) {
  return guarded([&] { pointee("num_rows", num_rows) = handle("plan", plan).plan.num_rows(); });
}

crossdock_status crossdock_plan_dropped(const crossdock_plan* plan, int64_t* dropped) {
  return guarded([&] {
    const Plan& described = handle("plan", plan).plan;
    const std::span<const int64_t> counts = described.dropped();
    std::copy(counts.begin(), counts.end(), &pointee("dropped", dropped));
  });
}
