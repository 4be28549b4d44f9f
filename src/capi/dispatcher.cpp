#include <algorithm>
#include <memory>
#include <span>
#include <string>

#include "capi/collective.hpp"
#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/structs.hpp"
#include "capi/tensors.hpp"

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
    made = new crossdock_dispatcher(members, capi::to_config(given, given.num_experts), strategy);
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
    changed.dispatcher.set_device_options(
        {.stream = {given.stream}, .max_sms = given.max_sms, .nccl_comm = given.nccl_comm});
    changed.stream = {given.stream};
  });
}

crossdock_status crossdock_dispatcher_check(crossdock_dispatcher* dispatcher) {
  return guarded([&] { handle("dispatcher", dispatcher).dispatcher.check(); });
}

crossdock_status crossdock_plan_create(crossdock_dispatcher* dispatcher,
                                       const crossdock_routing* routing, crossdock_plan** plan) {
  return guarded([&] {
    crossdock_dispatcher& owner = handle("dispatcher", dispatcher);
    Dispatcher& planner = owner.dispatcher;
    ConstTensorView routes;
    ConstTensorView weights;
    ConstTensorView mask;
    bool is_dense = false;
    std::unique_ptr<crossdock_plan> made;
    capi::convert({.group = owner.group->open(), .operation = "plan"}, [&] {
      pointee("plan", plan);
      const auto given = capi::read_struct("crossdock_routing", routing);
      is_dense = given.map.num_dims != 0;
      CROSSDOCK_CHECK(!is_dense || given.expert_ids.num_dims == 0,
                      "crossdock_routing: give either expert_ids or map, not both");
      routes = is_dense ? capi::to_view("map", given.map)
                        : capi::to_view("expert_ids", given.expert_ids);
      weights = capi::to_view("weights", given.weights);
      mask = capi::to_view("mask", given.mask);
      made = std::make_unique<crossdock_plan>(owner.group);
    });
    made->plan =
        is_dense ? planner.plan(DenseRouting{.map = routes, .weights = weights, .mask = mask})
                 : planner.plan(Routing{.expert_ids = routes, .weights = weights, .mask = mask});
    *plan = made.release();
  });
}

void crossdock_plan_destroy(crossdock_plan* plan) {
  capi::destroy(plan);
}

crossdock_status crossdock_plan_describe(const crossdock_plan* plan, crossdock_plan_info* info) {
  return guarded([&] {
    const Plan& described = handle("plan", plan).plan;
    const Segments segments = described.segments();
    crossdock_plan_info value = {};
    value.id = described.id();
    value.num_tokens = described.num_tokens();
    value.capacity_rows = described.capacity_rows();
    value.num_local_experts = described.num_local_experts();
    value.segment_starts = segments.starts;
    value.segment_counts = segments.counts;
    value.weights = capi::from_view(described.weights());
    value.device_kind = static_cast<int32_t>(described.device().kind);
    value.device_index = described.device().index;
    capi::write_struct("crossdock_plan_info", info, value);
  });
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
