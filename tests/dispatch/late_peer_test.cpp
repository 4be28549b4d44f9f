// A late rank stores into a peer's memory after that peer has given up and continued.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/threads.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

constexpr int64_t kWidth = 4096;  // large enough for a dispatch to use the thread pool

// All tokens go to expert 0 on rank 0; rank 0 has no tokens.
struct Tokens {
  explicit Tokens(int64_t T)
      : ids(static_cast<size_t>(T)), weights(ids.size(), 1.0F), x(ids.size() * kWidth, 1.0F) {}

  Routing routing() const {
    return {.expert_ids = {ids.data(), {std::ssize(ids), 1}},
            .weights = {weights.data(), {std::ssize(ids), 1}},
            .mask = {}};
  }
  ConstTensorView view() const { return {x.data(), {std::ssize(ids), kWidth}}; }

  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> x;
};

// Occupies both threads of a pool until it is released.
class BusyPool {
 public:
  explicit BusyPool(ThreadPool& pool)
      : caller_([this, &pool] {
          pool.parallel_for(2, [this](int64_t) {
            begun_.count_down();
            release_.wait();
          });
        }) {
    begun_.wait();
  }
  void release() { release_.count_down(); }

 private:
  std::latch begun_{2};
  std::latch release_{1};
  std::jthread caller_;
};

struct Rank {
  Rank(std::unique_ptr<Communicator> communicator, GroupOptions options, int64_t T)
      : group(std::move(communicator), std::move(options)), small(T), large(T + T / 2) {}

  Group group;
  Tokens small;
  Tokens large;  // its rows fit in no block of `small`, but a block could grow to hold them
  Dispatcher dispatcher{group, {.num_experts = 2, .top_k = 1, .width = kWidth}, "direct"};
  Plan small_plan = {};
  Plan large_plan = {};

  void plan() {
    small_plan = dispatcher.plan(small.routing());
    large_plan = dispatcher.plan(large.routing());
  }
};

TEST(LatePeer, FindsTheMemoryOfARankThatGaveUpAsItWas) {
  auto communicators = make_thread_communicators(2);
  const auto late_pool = std::make_shared<ThreadPool>(2);
  constexpr std::chrono::seconds kAmple{60};
  auto early = std::make_unique<Rank>(
      std::move(communicators[0]),
      GroupOptions{.arrival_deadline = kAmple, .progress_deadline = std::chrono::milliseconds(500)},
      0);
  Rank late(std::move(communicators[1]),
            {.arrival_deadline = kAmple, .progress_deadline = kAmple, .threads = late_pool}, 64);

  std::latch gave_up{1};
  std::jthread late_rank([&] {
    late.plan();
    BusyPool busy(*late_pool);
    std::jthread releaser([&] {
      gave_up.wait();
      busy.release();
    });
    const std::string message =
        message_of([&] { late.dispatcher.dispatch(late.small_plan, {.x = late.small.view()}); });
    EXPECT_NE(message.find("rank 0 gave up"), std::string::npos) << message;
  });

  early->plan();
  const std::string message = message_of(
      [&] { early->dispatcher.dispatch(early->small_plan, {.x = early->small.view()}); });
  EXPECT_NE(message.find("for rank 1 to arrive at dispatch"), std::string::npos) << message;
  EXPECT_TRUE(early->group.is_poisoned());

  // Memory that rank 1 still writes to is neither reused nor replaced by a larger block.
  const int64_t held = early->group.memory().window_bytes;
  EXPECT_EQ(held, 64 * kWidth * 4);
  const auto again = [&](const std::function<void()>& call) {
    EXPECT_EQ(message_of(call), message);
    EXPECT_EQ(early->group.memory().window_bytes, held);
  };
  again([&] { early->dispatcher.dispatch(early->large_plan, {.x = early->large.view()}); });
  again(
      [&] { static_cast<void>(early->dispatcher.allocate_rows(early->small_plan, DType::kF32)); });
  again(
      [&] { static_cast<void>(early->dispatcher.allocate_rows(early->large_plan, DType::kF32)); });
  again([&] {
    const std::vector<float> y(96 * kWidth);
    static_cast<void>(early->dispatcher.combine_backward(early->large_plan, early->large.view(),
                                                         {y.data(), {96, kWidth}}));
  });
  early.reset();  // the memory outlives its owner
  gave_up.count_down();
}

}  // namespace
}  // namespace crossdock
