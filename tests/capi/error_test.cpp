// Statuses and texts of failures, here and on other ranks.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

TEST(CErrors, ThereIsNoneAtFirstAndItBelongsToItsThread) {
  std::jthread([] {
    EXPECT_STREQ(crossdock_last_error(), "");
    auto info = made<crossdock_error_info>();
    EXPECT_OK(crossdock_last_error_info(&info));
    EXPECT_EQ(info.status, CROSSDOCK_OK);
    EXPECT_EQ(crossdock_group_check(nullptr), CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(), "group must not be NULL");
    std::jthread([] { EXPECT_STREQ(crossdock_last_error(), ""); });
  });
}

TEST(CErrors, StatusesHaveNames) {
  EXPECT_STREQ(crossdock_status_name(CROSSDOCK_OK), "ok");
  EXPECT_STREQ(crossdock_status_name(CROSSDOCK_TIMEOUT), "timeout");
  EXPECT_STREQ(crossdock_status_name(CROSSDOCK_OUT_OF_MEMORY), "out of memory");
  EXPECT_STREQ(crossdock_status_name(99), "unknown");
  EXPECT_STREQ(crossdock_status_name(-1), "unknown");
}

TEST(CErrors, DestroyAcceptsNull) {
  crossdock_group_destroy(nullptr);
  crossdock_group_leave(nullptr, nullptr);
  crossdock_dispatcher_destroy(nullptr);
  crossdock_plan_destroy(nullptr);
  crossdock_experts_destroy(nullptr);
  crossdock_experts_saved_destroy(nullptr);
  crossdock_layer_destroy(nullptr);
  crossdock_layer_saved_destroy(nullptr);
  crossdock_job_plan_destroy(nullptr);
  crossdock_bootstrap_destroy(nullptr);
}

TEST(CErrors, AnInvalidConfigurationIsReportedByTheFirstPlan) {
  run_c_ranks(2, [](crossdock_group* group, int rank) {
    auto config = Case::config();
    config.top_k = 12;
    crossdock_dispatcher* dispatcher = nullptr;
    ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
    const Case input(rank);
    const crossdock_routing routing = input.routing();
    crossdock_plan* plan = nullptr;
    EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &plan), CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(), "rank 0: num_experts (5) must be at least top_k (12)");
    EXPECT_EQ(plan, nullptr);
    auto info = made<crossdock_error_info>();
    EXPECT_OK(crossdock_last_error_info(&info));
    EXPECT_EQ(info.status, CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_EQ(info.culprit, 0);
    EXPECT_STREQ(info.operation, "plan");
    crossdock_dispatcher_destroy(dispatcher);
  });
}

/// A dispatch of one rank, with valid arguments.
struct DispatchCall {
  Case input;
  Planned planned;
  crossdock_dispatch_args args = made<crossdock_dispatch_args>();
  crossdock_dispatch_result sent = made<crossdock_dispatch_result>();

  DispatchCall(crossdock_group* group, int rank) : input(rank), planned(group, input) {
    args.x = tensor(input.x, input.T, Case::D);
  }

  crossdock_status make() {
    return crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent);
  }
  void expect_ok() {
    EXPECT_OK(make());
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
  }
};

// The values of these fields do not fit in the C++ API's configuration. Only rank 1 has them.
TEST(CErrors, AnUndefinedValueOfOneRankIsReportedByTheFirstPlanOnAll) {
  using Config = crossdock_dispatch_config;
  const std::pair<int32_t Config::*, const char*> fields[] = {
      {&Config::nonfinite, "rank 1: nonfinite must be in [0, 2), got 257"},
      {&Config::partial_sums, "rank 1: partial_sums must be in [0, 3), got 257"},
      {&Config::copies, "rank 1: copies must be in [0, 3), got 257"},
      {&Config::drop_policy, "rank 1: drop_policy must be in [0, 2), got 257"}};
  run_c_ranks(2, [&](crossdock_group* group, int rank) {
    for (const auto& [field, message] : fields) {
      auto config = Case::config();
      config.capacity_factor = 4;
      if (rank == 1) config.*field = 257;
      crossdock_dispatcher* dispatcher = nullptr;
      ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
      const Case input(rank);
      const crossdock_routing routing = input.routing();
      crossdock_plan* plan = nullptr;
      EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &plan), CROSSDOCK_INVALID_ARGUMENT);
      EXPECT_STREQ(crossdock_last_error(), message);
      EXPECT_EQ(plan, nullptr);
      EXPECT_OK(crossdock_group_check(group));
      crossdock_dispatcher_destroy(dispatcher);
    }
    DispatchCall(group, rank).expect_ok();
  });
}

// Only the C API can refuse these arguments: the other ranks must not wait.
TEST(CErrors, ArgumentsThatCannotBeConvertedAreTheSameErrorOnEveryRank) {
  run_c_ranks(3, [](crossdock_group* group, int rank) {
    DispatchCall call(group, rank);
    if (rank == 1) call.args.x.num_dims = 7;
    EXPECT_EQ(call.make(), CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(), "rank 1: x: num_dims must be in [0, 4], got 7");

    const bool gives_none = rank == 2;
    call.args.x = tensor(call.input.x, call.input.T, Case::D);
    EXPECT_EQ(crossdock_dispatch(call.planned.dispatcher, call.planned.plan,
                                 gives_none ? nullptr : &call.args, &call.sent),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(), "rank 2: crossdock_dispatch_args must not be NULL");

    call.expect_ok();
  });
}

TEST(CErrors, ACallerRefusesItsNextCallOnEveryRank) {
  run_c_ranks(3, [](crossdock_group* group, int rank) {
    DispatchCall call(group, rank);
    if (rank == 1) {
      crossdock_refuse_next_call("the seed must be an integer, got 'x'");
      EXPECT_EQ(crossdock_dispatch(nullptr, nullptr, nullptr, nullptr), CROSSDOCK_INVALID_ARGUMENT)
          << "not a collective call without a dispatcher";
    }
    EXPECT_EQ(
        crossdock_dispatch(call.planned.dispatcher, call.planned.plan,
                           rank == 1 ? nullptr : &call.args, rank == 1 ? nullptr : &call.sent),
        CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(), "rank 1: the seed must be an integer, got 'x'");

    if (rank == 1) {
      crossdock_refuse_next_call("withdrawn");
      crossdock_refuse_next_call(nullptr);
    }
    call.expect_ok();
  });
}

TEST(CErrors, ARefusedCallMustHaveThePlanOfTheOtherRanks) {
  run_c_ranks(3, [](crossdock_group* group, int rank) {
    DispatchCall call(group, rank);
    if (rank == 1) crossdock_refuse_next_call("the seed must be an integer, got 'x'");
    EXPECT_EQ(crossdock_dispatch(call.planned.dispatcher, rank == 1 ? nullptr : call.planned.plan,
                                 &call.args, &call.sent),
              CROSSDOCK_MISMATCH);
    call.expect_ok();
  });
}

TEST(CErrors, FunctionsThatMakeAGroupIgnoreARefusal) {
  run_c_ranks(2, [](crossdock_group* group, int rank) {
    if (rank == 1) crossdock_refuse_next_call("not for a group");
    const int32_t members[] = {0, 1};
    crossdock_group* made = nullptr;
    ASSERT_OK(crossdock_group_subgroup(group, members, 2, &made));
    EXPECT_EQ(crossdock_group_all_reduce(made, nullptr, 0), CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(), "rank 1: not for a group");
    crossdock_group_destroy(made);
  });
}

TEST(CErrors, ARankThatLeavesIsNamedAndPoisonsTheGroup) {
  run_c_ranks(3, [](crossdock_group* group, int rank) {
    if (rank == 2) return;
    const Case input(rank);
    auto config = Case::config();
    crossdock_dispatcher* dispatcher = nullptr;
    ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
    const crossdock_routing routing = input.routing();
    crossdock_plan* plan = nullptr;
    EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &plan), CROSSDOCK_PEER_FAILED);
    auto error = made<crossdock_error_info>();
    EXPECT_OK(crossdock_last_error_info(&error));
    EXPECT_EQ(error.culprit, 2);
    EXPECT_EQ(crossdock_group_check(group), CROSSDOCK_PEER_FAILED);
    crossdock_dispatcher_destroy(dispatcher);

    const int32_t survivors[] = {0, 1};
    crossdock_group* fresh = nullptr;
    ASSERT_OK(crossdock_group_subgroup(group, survivors, 2, &fresh));
    auto info = made<crossdock_group_info>();
    EXPECT_OK(crossdock_group_describe(fresh, &info));
    EXPECT_EQ(info.size, 2);
    crossdock_group_destroy(fresh);
  });
}

}  // namespace
}  // namespace crossdock::capi_test
