// A communicator of callbacks carries a dispatch, and its failures reach the caller.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "capi/c_ranks.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::capi_test {
namespace {

// Callbacks that use a communicator of threads. The bytes need no owner: the callers wait.
struct Context {
  std::unique_ptr<Communicator> communicator;
  std::string left{};
  std::string aborted{};
  bool is_destroyed = false;
  bool fails = false;
};

SharedBytes borrow(const void* data, int64_t num_bytes) {
  static const auto kOwner = std::make_shared<int>();
  return {static_cast<std::byte*>(const_cast<void*>(data)), num_bytes, kOwner};
}

WaitContext to_wait(const crossdock_wait* wait) {
  const auto nanoseconds = [](double seconds) {
    return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
  };
  return {.operation = wait->operation,
          .sequence = wait->sequence,
          .arrival = nanoseconds(wait->arrival_s),
          .progress = nanoseconds(wait->progress_s)};
}

std::span<const int64_t> offsets_of(const Context& context, const int64_t* offsets) {
  return {offsets, static_cast<size_t>(context.communicator->size()) + 1};
}

crossdock_status all_gather_v(void* opaque, const void* send, int64_t send_bytes, void* recv,
                              const int64_t* recv_offsets, const crossdock_wait* wait) {
  auto& context = *static_cast<Context*>(opaque);
  if (context.fails) {
    crossdock_set_callback_error("the cable is out");
    return CROSSDOCK_COMMUNICATION;
  }
  const auto offsets = offsets_of(context, recv_offsets);
  context.communicator->all_gather_v(borrow(send, send_bytes), borrow(recv, offsets.back()),
                                     offsets, to_wait(wait));
  return CROSSDOCK_OK;
}

crossdock_status all_to_all_v(void* opaque, const void* send, const int64_t* send_offsets,
                              void* recv, const int64_t* recv_offsets, const crossdock_wait* wait) {
  auto& context = *static_cast<Context*>(opaque);
  const auto sent = offsets_of(context, send_offsets);
  const auto received = offsets_of(context, recv_offsets);
  context.communicator->all_to_all_v(borrow(send, sent.back()), sent, borrow(recv, received.back()),
                                     received, to_wait(wait));
  return CROSSDOCK_OK;
}

crossdock_communicator callbacks_of(Context& context) {
  auto callbacks = made<crossdock_communicator>();
  callbacks.context = &context;
  callbacks.rank = context.communicator->rank();
  callbacks.size = context.communicator->size();
  callbacks.all_gather_v = all_gather_v;
  callbacks.all_to_all_v = all_to_all_v;
  callbacks.leave = [](void* opaque, const char* reason) {
    static_cast<Context*>(opaque)->left = reason;
  };
  callbacks.abort = [](void* opaque, const char* reason) {
    static_cast<Context*>(opaque)->aborted = reason;
  };
  callbacks.destroy = [](void* opaque) { static_cast<Context*>(opaque)->is_destroyed = true; };
  return callbacks;
}

TEST(Callbacks, CarryADispatchAndACombine) {
  constexpr int kRanks = 3;
  reference::LayerInput layer{
      .config = {.num_experts = Case::E, .top_k = Case::K, .width = Case::D}};
  for (int rank = 0; rank < kRanks; ++rank) layer.ranks.push_back(Case(rank).reference_input());
  const reference::LayerOutput wanted = reference::run_layer(layer);

  auto communicators = make_thread_communicators(kRanks);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto r = static_cast<size_t>(rank);
      Context context{.communicator = std::move(communicators[r])};
      const crossdock_communicator callbacks = callbacks_of(context);
      crossdock_group* group = nullptr;
      ASSERT_OK(crossdock_group_from_callbacks(&callbacks, nullptr, &group));
      auto info = made<crossdock_group_info>();
      EXPECT_OK(crossdock_group_describe(group, &info));
      EXPECT_STREQ(info.communicator, "callbacks");
      EXPECT_EQ(info.num_nodes, kRanks);
      std::vector<float> sum = {static_cast<float>(1 + rank)};
      const crossdock_tensor summed = tensor(sum, 1, 1);
      EXPECT_OK(crossdock_group_all_reduce(group, &summed, 1));
      EXPECT_EQ(sum[0], 6);
      {
        const Case input(rank);
        const Planned planned(group, input);
        auto args = made<crossdock_dispatch_args>();
        args.x = tensor(input.x, input.T, Case::D);
        auto sent = made<crossdock_dispatch_result>();
        ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
        EXPECT_EQ(doubles(sent.rows.tensor), wanted.rows[r]);
        crossdock_output out{};
        ASSERT_OK(crossdock_combine(planned.dispatcher, planned.plan, &sent.rows.tensor, &out));
        EXPECT_EQ(doubles(out.tensor), wanted.out[r]);
        EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
        EXPECT_OK(crossdock_output_release(&out, nullptr));
      }
      const int32_t alone[] = {rank};
      crossdock_group* subgroup = nullptr;
      EXPECT_EQ(crossdock_group_subgroup(group, alone, 1, &subgroup), CROSSDOCK_UNSUPPORTED);
      crossdock_group_destroy(group);
      EXPECT_NE(context.left, "");
      EXPECT_TRUE(context.is_destroyed);
    });
  }
}

TEST(Callbacks, AFailureHasTheReasonOfTheCallback) {
  auto communicators = make_thread_communicators(1);
  Context context{.communicator = std::move(communicators[0]), .fails = true};
  const crossdock_communicator callbacks = callbacks_of(context);
  crossdock_group* group = nullptr;
  ASSERT_OK(crossdock_group_from_callbacks(&callbacks, nullptr, &group));
  auto config = Case::config();
  crossdock_dispatcher* dispatcher = nullptr;
  ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
  const Case input(0);
  const crossdock_routing routing = input.routing();
  crossdock_plan* plan = nullptr;
  EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &plan), CROSSDOCK_COMMUNICATION);
  EXPECT_NE(std::string(crossdock_last_error()).find("the cable is out"), std::string::npos)
      << crossdock_last_error();
  EXPECT_NE(context.aborted.find("the cable is out"), std::string::npos) << context.aborted;
  EXPECT_EQ(crossdock_group_check(group), CROSSDOCK_COMMUNICATION);
  crossdock_dispatcher_destroy(dispatcher);
  crossdock_group_destroy(group);
}

// A callback's failure poisons the group, so its status must not be one that leaves a group usable.
TEST(Callbacks, AnUnfitStatusBecomesAFailureOfTheCommunicator) {
  auto callbacks = made<crossdock_communicator>();
  callbacks.size = 1;
  callbacks.all_gather_v = [](void*, const void*, int64_t, void*, const int64_t*,
                              const crossdock_wait*) -> crossdock_status {
    return CROSSDOCK_INVALID_ARGUMENT;
  };
  callbacks.all_to_all_v = all_to_all_v;
  crossdock_group* group = nullptr;
  ASSERT_OK(crossdock_group_from_callbacks(&callbacks, nullptr, &group));
  const auto config = Case::config();
  crossdock_dispatcher* dispatcher = nullptr;
  ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
  const Case input(0);
  const crossdock_routing routing = input.routing();
  crossdock_plan* plan = nullptr;
  EXPECT_EQ(crossdock_plan_create(dispatcher, &routing, &plan), CROSSDOCK_COMMUNICATION);
  crossdock_dispatcher_destroy(dispatcher);
  crossdock_group_destroy(group);
}

// Makes a communicator of the members, whose context is freed by its `destroy`.
crossdock_status subgroup(void* opaque, const int32_t* members, int32_t num_members,
                          crossdock_communicator* communicator) {
  const auto& whole = *static_cast<Context*>(opaque);
  const std::vector<int> ranks(members, members + num_members);
  auto* context = new Context{.communicator = whole.communicator->subgroup(ranks)};
  *communicator = callbacks_of(*context);
  communicator->destroy = [](void* made_here) { delete static_cast<Context*>(made_here); };
  return CROSSDOCK_OK;
}

TEST(Callbacks, CanMakeSubgroups) {
  constexpr int kRanks = 3;
  auto communicators = make_thread_communicators(kRanks);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Context context{.communicator = std::move(communicators[static_cast<size_t>(rank)])};
      crossdock_communicator callbacks = callbacks_of(context);
      callbacks.subgroup = subgroup;
      crossdock_group* group = nullptr;
      const crossdock_group_config config = with_deadlines();
      ASSERT_OK(crossdock_group_from_callbacks(&callbacks, &config, &group));
      const int32_t members[] = {0, 2};
      if (rank != 1) {
        crossdock_group* pair = nullptr;
        EXPECT_OK(crossdock_group_subgroup(group, members, 2, &pair));
        { const Planned planned(pair, Case(rank)); }
        auto info = made<crossdock_group_info>();
        EXPECT_OK(crossdock_group_describe(pair, &info));
        EXPECT_EQ(info.size, 2);
        crossdock_group_destroy(pair);
      }
      crossdock_group_destroy(group);
    });
  }
}

TEST(Callbacks, LoseNoContextOfASubgroupThatCannotBeUsed) {
  auto communicators = make_thread_communicators(1);
  Context context{.communicator = std::move(communicators[0])};
  crossdock_communicator callbacks = callbacks_of(context);
  static bool is_destroyed;
  is_destroyed = false;
  callbacks.subgroup = [](void*, const int32_t*, int32_t,
                          crossdock_communicator* communicator) -> crossdock_status {
    communicator->context = &is_destroyed;
    communicator->size = 1;  // and no exchanges
    communicator->destroy = [](void* flag) { *static_cast<bool*>(flag) = true; };
    return CROSSDOCK_OK;
  };
  crossdock_group* group = nullptr;
  ASSERT_OK(crossdock_group_from_callbacks(&callbacks, nullptr, &group));
  const int32_t members[] = {0};
  crossdock_group* alone = nullptr;
  EXPECT_EQ(crossdock_group_subgroup(group, members, 1, &alone), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_TRUE(is_destroyed);
  EXPECT_EQ(alone, nullptr);
  crossdock_group_destroy(group);
}

TEST(Callbacks, KeepTheirContextIfNoGroupIsMade) {
  auto communicators = make_thread_communicators(1);
  Context context{.communicator = std::move(communicators[0])};
  const crossdock_communicator callbacks = callbacks_of(context);
  auto config = made<crossdock_group_config>();
  config.arrival_deadline_s = 1e-12;  // rounds to zero
  crossdock_group* group = nullptr;
  EXPECT_EQ(crossdock_group_from_callbacks(&callbacks, &config, &group),
            CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(group, nullptr);
  EXPECT_FALSE(context.is_destroyed);
  EXPECT_EQ(context.left, "");
}

TEST(Callbacks, NumbersOfRanksThatCannotBeAreRefused) {
  crossdock_group* group = nullptr;
  auto callbacks = made<crossdock_communicator>();
  callbacks.size = 100'000'000;
  EXPECT_EQ(crossdock_group_from_callbacks(&callbacks, nullptr, &group),
            CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(),
               "crossdock_communicator: size must be in [1, 65536], got 100000000");
  EXPECT_EQ(crossdock_group_from_threads(100'000'000, nullptr, &group), CROSSDOCK_INVALID_ARGUMENT);
}

TEST(Callbacks, BothExchangesAreNeeded) {
  auto callbacks = made<crossdock_communicator>();
  callbacks.size = 1;
  crossdock_group* group = nullptr;
  EXPECT_EQ(crossdock_group_from_callbacks(&callbacks, nullptr, &group),
            CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(),
               "crossdock_communicator: all_gather_v and all_to_all_v must not be NULL");
}

}  // namespace
}  // namespace crossdock::capi_test
