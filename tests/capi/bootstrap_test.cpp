// Groups from blobs: a dispatch, invalid blobs, and interrupted waits.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "capi/socket_ranks.hpp"

namespace crossdock::capi_test {
namespace {

TEST(Bootstrap, RanksThatJoinByBlobsCarryADispatchAndACombine) {
  constexpr int kRanks = 3;
  reference::LayerInput layer{
      .config = {.num_experts = Case::E, .top_k = Case::K, .width = Case::D}};
  for (int rank = 0; rank < kRanks; ++rank) layer.ranks.push_back(Case(rank).reference_input());
  const reference::LayerOutput wanted = reference::run_layer(layer);
  for (const int32_t ranks_per_node : {0, 1}) {
    auto config = local_bootstrap();
    config.ranks_per_node = ranks_per_node;
    run_socket_ranks(kRanks, config, [&](crossdock_group* group, int rank) {
      auto info = made<crossdock_group_info>();
      EXPECT_OK(crossdock_group_describe(group, &info));
      EXPECT_STREQ(info.communicator, "sockets");
      EXPECT_STREQ(info.note, "");
      EXPECT_EQ(info.rank, rank);
      EXPECT_EQ(info.num_nodes, ranks_per_node == 0 ? 1 : kRanks);
      const Case input(rank);
      const Planned planned(group, input);
      auto args = made<crossdock_dispatch_args>();
      args.x = tensor(input.x, input.T, Case::D);
      auto sent = made<crossdock_dispatch_result>();
      ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
      crossdock_output out{};
      ASSERT_OK(crossdock_combine(planned.dispatcher, planned.plan, &sent.rows.tensor, &out));
      EXPECT_EQ(doubles(out.tensor), wanted.out[static_cast<size_t>(rank)]);
      EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
      EXPECT_OK(crossdock_output_release(&out, nullptr));
    });
  }
}

TEST(Bootstrap, WrongBlobsAreErrors) {
  const auto config = local_bootstrap();
  crossdock_bootstrap* bootstrap = nullptr;
  ASSERT_OK(crossdock_bootstrap_open(&config, &bootstrap));
  const std::string own = blob_of(bootstrap);
  crossdock_group* group = nullptr;
  const auto join = [&](const crossdock_join_args& args) {
    return crossdock_group_join(bootstrap, &args, nullptr, &group);
  };
  const Blobs good({own});
  crossdock_join_args args = good.args(0);
  args.rank = 1;
  EXPECT_EQ(join(args), CROSSDOCK_INVALID_ARGUMENT);
  args = good.args(0);
  args.offsets = nullptr;
  EXPECT_EQ(join(args), CROSSDOCK_INVALID_ARGUMENT);
  Blobs descending({own});
  descending.offsets = {10, 3};
  EXPECT_EQ(join(descending.args(0)), CROSSDOCK_INVALID_ARGUMENT);
  Blobs huge({own});
  huge.offsets = {0, int64_t{1} << 40};  // must not be read
  EXPECT_EQ(join(huge.args(0)), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(group, nullptr);
  crossdock_bootstrap_destroy(bootstrap);
}

TEST(Bootstrap, ADamagedBlobIsAnErrorAndSoIsASecondJoin) {
  const auto config = local_bootstrap();
  crossdock_bootstrap* bootstrap = nullptr;
  ASSERT_OK(crossdock_bootstrap_open(&config, &bootstrap));
  std::string damaged = blob_of(bootstrap);
  damaged[damaged.size() / 2] ^= 1;
  crossdock_group* group = nullptr;
  const Blobs blobs({damaged});
  const crossdock_join_args args = blobs.args(0);
  EXPECT_EQ(crossdock_group_join(bootstrap, &args, nullptr, &group), CROSSDOCK_INVALID_ARGUMENT);
  crossdock_bootstrap_destroy(bootstrap);

  ASSERT_OK(crossdock_bootstrap_open(&config, &bootstrap));
  const Blobs good({blob_of(bootstrap)});
  const crossdock_join_args good_args = good.args(0);
  ASSERT_OK(crossdock_group_join(bootstrap, &good_args, nullptr, &group));
  crossdock_group* second = nullptr;
  EXPECT_EQ(crossdock_group_join(bootstrap, &good_args, nullptr, &second),
            CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(second, nullptr);
  crossdock_bootstrap_destroy(bootstrap);
  crossdock_group_destroy(group);
}

struct Interrupt {
  std::atomic<bool> is_wanted = false;
  std::atomic<int> num_calls = 0;
};

int32_t is_interrupted(void* context) {
  auto& interrupt = *static_cast<Interrupt*>(context);
  ++interrupt.num_calls;
  return interrupt.is_wanted ? 1 : 0;
}

TEST(Bootstrap, AWaitCanBeInterrupted) {
  Interrupt interrupt;
  std::atomic<bool> is_over = false;
  auto config = local_bootstrap();
  config.interrupt = is_interrupted;
  config.interrupt_context = &interrupt;
  run_socket_ranks(2, config, [&](crossdock_group* group, int rank) {
    const auto wait_for = [](const auto& condition) {
      while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    if (rank == 1) {  // makes no call
      const int before = interrupt.num_calls;
      wait_for([&] { return interrupt.num_calls > before + 1 || is_over; });
      interrupt.is_wanted = true;
      wait_for([&] { return is_over.load(); });
      return;
    }
    const auto dispatch = Case::config();
    crossdock_dispatcher* dispatcher = nullptr;
    EXPECT_OK(crossdock_dispatcher_create(group, &dispatch, &dispatcher));
    const Case input(0);
    const crossdock_routing routing = input.routing();
    crossdock_plan* plan = nullptr;
    EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &plan), CROSSDOCK_COMMUNICATION);
    EXPECT_NE(std::string(crossdock_last_error()).find("interrupted in plan"), std::string::npos)
        << crossdock_last_error();
    is_over = true;
    crossdock_dispatcher_destroy(dispatcher);
  });
}

}  // namespace
}  // namespace crossdock::capi_test
