// Handles of the wrong type, destroyed too early or used out of order.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

TEST(Handles, OfAnotherTypeAreRefused) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    const Planned planned(group, Case(0));
    auto* as_dispatcher = reinterpret_cast<crossdock_dispatcher*>(group);
    EXPECT_EQ(crossdock_dispatcher_check(as_dispatcher), CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(),
                 "dispatcher must be a handle of its own type that has not been destroyed");
    auto* as_group = reinterpret_cast<crossdock_group*>(planned.plan);
    EXPECT_EQ(crossdock_group_check(as_group), CROSSDOCK_INVALID_ARGUMENT);
    int64_t num_rows = -1;
    auto* as_plan = reinterpret_cast<crossdock_plan*>(planned.dispatcher);
    EXPECT_EQ(crossdock_plan_num_rows(as_plan, &num_rows), CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_EQ(num_rows, -1);
    crossdock_dispatcher_destroy(as_dispatcher);  // do nothing
    crossdock_group_destroy(as_group);
    crossdock_plan_destroy(as_plan);
    EXPECT_OK(crossdock_group_check(group));
    EXPECT_OK(crossdock_dispatcher_check(planned.dispatcher));
    EXPECT_OK(crossdock_plan_num_rows(planned.plan, &num_rows));
  });
}

TEST(Handles, APlanThatIsMissingOrWrongOnOneRankIsTheSameErrorOnEveryRank) {
  run_c_ranks(3, [](crossdock_group* group, int rank) {
    const Case input(rank);
    const Planned planned(group, input);
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    auto sent = made<crossdock_dispatch_result>();
    for (const crossdock_plan* wrong :
         {static_cast<const crossdock_plan*>(nullptr),
          reinterpret_cast<const crossdock_plan*>(planned.dispatcher)}) {
      const crossdock_plan* plan = rank == 1 ? wrong : planned.plan;
      EXPECT_NE(crossdock_dispatch(planned.dispatcher, plan, &args, &sent), CROSSDOCK_OK);
      EXPECT_NE(std::string(crossdock_last_error()).find("rank 1"), std::string::npos)
          << crossdock_last_error();
      EXPECT_OK(crossdock_group_check(group));
    }
    ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
  });
}

TEST(Handles, MayBeDestroyedInAnyOrder) {
  crossdock_group* group = nullptr;
  ASSERT_OK(crossdock_group_from_threads(1, nullptr, &group));
  const Case input(0);
  const auto config = Case::config();
  crossdock_dispatcher* dispatcher = nullptr;
  ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
  const crossdock_routing routing = input.routing();
  crossdock_plan* plan = nullptr;
  ASSERT_OK(crossdock_plan_create(dispatcher, &routing, &plan));
  auto args = made<crossdock_dispatch_args>();
  args.x = tensor(input.x, input.T, Case::D);
  auto sent = made<crossdock_dispatch_result>();
  ASSERT_OK(crossdock_dispatch(dispatcher, plan, &args, &sent));
  const std::vector<double> rows = doubles(sent.rows.tensor);

  crossdock_group_destroy(group);
  auto again = made<crossdock_dispatch_result>();
  EXPECT_EQ(crossdock_dispatch(dispatcher, plan, &args, &again), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(),
               "the group has been destroyed; destroy it after the last call");
  crossdock_plan* other = nullptr;
  EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &other), CROSSDOCK_INVALID_ARGUMENT);
  crossdock_dispatcher_destroy(dispatcher);
  auto info = made<crossdock_plan_info>();
  EXPECT_OK(crossdock_plan_describe(plan, &info));
  crossdock_plan_destroy(plan);
  EXPECT_EQ(doubles(sent.rows.tensor), rows);
  EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
}

TEST(Handles, PeersLearnThatAGroupIsDestroyedWhileADispatcherKeepsItsMemory) {
  crossdock_group* groups[2] = {};
  const crossdock_group_config deadlines = with_deadlines();
  ASSERT_OK(crossdock_group_from_threads(2, &deadlines, groups));
  const auto config = Case::config();
  crossdock_dispatcher* dispatchers[2] = {};
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_OK(crossdock_dispatcher_create(groups[rank], &config, &dispatchers[rank]));
  }
  crossdock_group_destroy(groups[1]);
  const Case input(0);
  const crossdock_routing routing = input.routing();
  crossdock_plan* plan = nullptr;
  EXPECT_EQ(crossdock_plan_create(dispatchers[0], &routing, &plan), CROSSDOCK_PEER_FAILED);
  crossdock_dispatcher_destroy(dispatchers[1]);
  crossdock_dispatcher_destroy(dispatchers[0]);
  crossdock_group_destroy(groups[0]);
}

TEST(Handles, APendingCallSurvivesAnInvalidFinish) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    const Case input(0);
    const Planned planned(group, input);
    const Planned other(group, input);
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    crossdock_pending* pending = nullptr;
    ASSERT_OK(crossdock_begin_dispatch(planned.dispatcher, planned.plan, &args, nullptr, &pending));
    crossdock_output out{};
    auto sent = made<crossdock_dispatch_result>();
    EXPECT_EQ(crossdock_finish_combine(planned.dispatcher, pending, &out),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_EQ(crossdock_finish_dispatch(planned.dispatcher, pending, nullptr),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_EQ(crossdock_finish_dispatch(other.dispatcher, pending, &sent),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_EQ(crossdock_finish_dispatch(nullptr, pending, &sent), CROSSDOCK_INVALID_ARGUMENT);
    ASSERT_OK(crossdock_finish_dispatch(planned.dispatcher, pending, &sent));
    EXPECT_EQ(sent.rows.tensor.shape[0], planned.info.capacity_rows);
    // A second call would leak this memory.
    ASSERT_OK(crossdock_begin_dispatch(planned.dispatcher, planned.plan, &args, nullptr, &pending));
    EXPECT_EQ(crossdock_finish_dispatch(planned.dispatcher, pending, &sent),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
    ASSERT_OK(crossdock_finish_dispatch(planned.dispatcher, pending, &sent));
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
  });
}

TEST(Handles, DestroyedPendingCallsGiveTheirMemoryBack) {
  for (const char* strategy : {"direct", "hierarchical", "alltoall", "allgather"}) {
    run_c_ranks(3, [&](crossdock_group* group, int rank) {
      const Case input(rank);
      auto config = Case::config();
      config.strategy = strategy;
      const Planned planned(group, input, config);
      auto args = made<crossdock_dispatch_args>();
      args.x = tensor(input.x, input.T, Case::D);
      std::set<const void*> places;
      for (int step = 0; step < 50; ++step) {
        crossdock_pending* pending = nullptr;
        ASSERT_OK(
            crossdock_begin_dispatch(planned.dispatcher, planned.plan, &args, nullptr, &pending));
        auto arrived = made<crossdock_dispatch_result>();
        int64_t first = 0;
        int64_t last = 0;
        ASSERT_OK(crossdock_next_chunk(planned.dispatcher, pending, &arrived, &first, &last));
        places.insert(arrived.rows.tensor.data);
        crossdock_pending_destroy(pending);
      }
      EXPECT_LE(places.size(), 5u) << strategy;
    });
  }
}

TEST(Handles, APendingCallMayBeDestroyedLast) {
  crossdock_group* group = nullptr;
  ASSERT_OK(crossdock_group_from_threads(1, nullptr, &group));
  const Case input(0);
  crossdock_pending* sent = nullptr;
  crossdock_pending* combined = nullptr;
  {
    const Planned planned(group, input);
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    ASSERT_OK(crossdock_begin_dispatch(planned.dispatcher, planned.plan, &args, nullptr, &sent));
    const int64_t num_rows = planned.info.capacity_rows;
    const std::vector<float> rows(static_cast<size_t>(num_rows * Case::D), 1.0F);
    const crossdock_tensor y = tensor(rows, num_rows, Case::D);
    ASSERT_OK(crossdock_begin_combine(planned.dispatcher, planned.plan, &y, nullptr, &combined));
  }
  crossdock_group_destroy(group);
  crossdock_pending_destroy(sent);
  crossdock_pending_destroy(combined);
  crossdock_pending_destroy(nullptr);
}

// Passes NULL for each pointer that must not be NULL.
TEST(Handles, NullPointersAreErrors) {
  const auto expect_refused = [](crossdock_status status) {
    EXPECT_EQ(status, CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_NE(std::string(crossdock_last_error()).find("must not be NULL"), std::string::npos)
        << crossdock_last_error();
  };
  crossdock_group* group = nullptr;
  expect_refused(crossdock_group_from_threads(1, nullptr, nullptr));
  expect_refused(crossdock_group_from_mpi(nullptr, nullptr, nullptr));
  expect_refused(crossdock_group_from_callbacks(nullptr, nullptr, &group));
  expect_refused(crossdock_group_from_environment(nullptr, nullptr, nullptr));
  expect_refused(crossdock_bootstrap_open(nullptr, nullptr));
  expect_refused(crossdock_bootstrap_blob(nullptr, nullptr, nullptr));
  expect_refused(crossdock_group_join(nullptr, nullptr, nullptr, &group));
  expect_refused(crossdock_group_describe(nullptr, nullptr));
  expect_refused(crossdock_last_error_info(nullptr));
  expect_refused(crossdock_dispatcher_create(nullptr, nullptr, nullptr));
  expect_refused(crossdock_experts_create(nullptr, nullptr));
  expect_refused(crossdock_experts_forward(nullptr, nullptr, nullptr));
  expect_refused(crossdock_layer_create(nullptr, nullptr, nullptr));
  expect_refused(crossdock_job_plan_create(nullptr, nullptr));
  expect_refused(crossdock_mesh_create(nullptr, nullptr, nullptr));
  expect_refused(crossdock_mesh_describe(nullptr, nullptr));
  expect_refused(crossdock_mesh_group(nullptr, CROSSDOCK_MESH_TP, &group));
  expect_refused(crossdock_group_all_reduce(nullptr, nullptr, 0));
  expect_refused(crossdock_update_expert_bias(nullptr, nullptr, 0.1, 0));
  expect_refused(crossdock_output_release(nullptr, nullptr));
  run_c_ranks(1, [&](crossdock_group* one, int /*rank*/) {
    const Planned planned(one, Case(0));
    const auto config = Case::config();
    expect_refused(crossdock_dispatcher_create(one, nullptr, nullptr));
    expect_refused(crossdock_dispatcher_create(one, &config, nullptr));
    expect_refused(crossdock_set_device_options(planned.dispatcher, nullptr));
    expect_refused(crossdock_dispatcher_strategy(planned.dispatcher, nullptr));
    expect_refused(crossdock_plan_create(planned.dispatcher, nullptr, nullptr));
    expect_refused(
        crossdock_plan_create_described(planned.dispatcher, nullptr, nullptr, nullptr, nullptr));
    expect_refused(crossdock_plan_describe(planned.plan, nullptr));
    expect_refused(crossdock_plan_num_rows(planned.plan, nullptr));
    expect_refused(crossdock_plan_dropped(planned.plan, nullptr));
    expect_refused(crossdock_dispatch(planned.dispatcher, planned.plan, nullptr, nullptr));
    expect_refused(crossdock_combine(planned.dispatcher, planned.plan, nullptr, nullptr));
    expect_refused(crossdock_combine_backward(planned.dispatcher, planned.plan, nullptr, nullptr));
    expect_refused(crossdock_collect_routes(planned.dispatcher, planned.plan, nullptr, nullptr));
    expect_refused(crossdock_allocate_rows(planned.dispatcher, planned.plan, 2, nullptr));
    expect_refused(
        crossdock_begin_combine(planned.dispatcher, planned.plan, nullptr, nullptr, nullptr));
    expect_refused(crossdock_finish_combine(planned.dispatcher, nullptr, nullptr));
    expect_refused(crossdock_group_subgroup(one, nullptr, 1, nullptr));
    expect_refused(crossdock_group_all_reduce(one, nullptr, 1));
    expect_refused(crossdock_group_reduce_scatter(one, nullptr, nullptr));
    expect_refused(crossdock_mesh_create(one, nullptr, nullptr));
    expect_refused(crossdock_layer_create(one, nullptr, nullptr));
    EXPECT_OK(crossdock_group_check(one));
  });
}

}  // namespace
}  // namespace crossdock::capi_test
