// After fork, the child's copies of handles do nothing, and the parent's peers are unaffected.
#include <gtest/gtest.h>

#include <cstdlib>

#include "capi/socket_ranks.hpp"
#include "support/forked_child.hpp"

namespace crossdock::capi_test {
namespace {

// A plan and a dispatch on this rank of a group; returns whether they work.
bool can_dispatch(crossdock_group* group, const Case& input) {
  const auto config = Case::config();
  crossdock_dispatcher* dispatcher = nullptr;
  crossdock_plan* plan = nullptr;
  const crossdock_routing routing = input.routing();
  auto args = made<crossdock_dispatch_args>();
  args.x = tensor(input.x, input.T, Case::D);
  auto sent = made<crossdock_dispatch_result>();
  const bool works = crossdock_dispatcher_create(group, &config, &dispatcher) == CROSSDOCK_OK &&
                     crossdock_plan_create(dispatcher, &routing, &plan) == CROSSDOCK_OK &&
                     crossdock_dispatch(dispatcher, plan, &args, &sent) == CROSSDOCK_OK;
  crossdock_output_release(&sent.rows, nullptr);
  crossdock_plan_destroy(plan);
  crossdock_dispatcher_destroy(dispatcher);
  return works;
}

// Uses a parent's handles in a child. Returns 0 if every call behaves as it should.
int use_copies(crossdock_group* group, const Planned& planned, crossdock_output* output) {
  if (crossdock_group_check(group) != CROSSDOCK_UNSUPPORTED) return 1;
  if (crossdock_dispatcher_check(planned.dispatcher) != CROSSDOCK_UNSUPPORTED) return 2;
  auto info = made<crossdock_plan_info>();
  if (crossdock_plan_describe(planned.plan, &info) != CROSSDOCK_UNSUPPORTED) return 3;
  if (crossdock_output_release(output, nullptr) != CROSSDOCK_OK) return 4;
  crossdock_plan_destroy(planned.plan);
  crossdock_dispatcher_destroy(planned.dispatcher);
  crossdock_group_leave(group, "the child says so");
  crossdock_group_destroy(group);
  crossdock_group* own = nullptr;  // a new group works
  if (crossdock_group_from_threads(1, nullptr, &own) != CROSSDOCK_OK) return 5;
  if (!can_dispatch(own, Case(0))) return 6;
  crossdock_group_destroy(own);
  return 0;
}

void fork_and_go_on(crossdock_group* group, int rank) {
  const Case input(rank);
  const Planned planned(group, input);
  auto args = made<crossdock_dispatch_args>();
  args.x = tensor(input.x, input.T, Case::D);
  auto sent = made<crossdock_dispatch_result>();
  ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
  if (rank == 0) {
    crossdock_output copy = sent.rows;
    EXPECT_EQ(exit_status_of_child([&] { return use_copies(group, planned, &copy); }), 0);
  }
  EXPECT_TRUE(can_dispatch(group, input)) << crossdock_last_error();
  EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
}

TEST(Fork, AChildsCopiesOfThreadRanksDoNothing) {
  SKIP_IF_SANITIZED();
  run_c_ranks(2, fork_and_go_on);
}

TEST(Fork, AChildsCopiesOfSocketRanksDoNothing) {
  SKIP_IF_SANITIZED();
  run_socket_ranks(2, local_bootstrap(), fork_and_go_on);
}

// The threads of the process-wide pool do not exist in the child, which must not wait for them.
TEST(Fork, AChildCanExit) {
  SKIP_IF_SANITIZED();
  crossdock_group* group = nullptr;
  ASSERT_OK(crossdock_group_from_threads(1, nullptr, &group));
  EXPECT_TRUE(can_dispatch(group, Case(0)));
  EXPECT_EQ(exit_status_of_child([&]() -> int {
              crossdock_group_destroy(group);
              std::exit(0);
            }),
            0);
  crossdock_group_destroy(group);
}

}  // namespace
}  // namespace crossdock::capi_test
