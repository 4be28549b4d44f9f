// Pending calls that are finished, dropped, or outlive their dispatcher, on a path whose calls are
// not complete when they return.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "crossdock/threads.hpp"
#include "dispatch/path.hpp"

namespace crossdock {
namespace {

using Log = std::shared_ptr<std::vector<std::string>>;
using Events = std::vector<std::string>;

// Memory whose release is an event.
std::shared_ptr<const void> memory(const Log& log, const std::string& name) {
  return {nullptr, [log, name](const void*) { log->push_back(name + " is released"); }};
}

// Moves nothing. A combine "reads y" until it is finished.
class LoggingPath final : public Path {
 public:
  explicit LoggingPath(Log log) : log_(std::move(log)) {}
  ~LoggingPath() override { log_->push_back("the path is gone"); }

  Plan plan(const Routing& /*routing*/) override { return {}; }
  Plan plan(const DenseRouting& /*routing*/) override { return {}; }
  DispatchResult dispatch(const Plan& /*plan*/, const DispatchArgs& /*args*/,
                          Begun* begun) override {
    if (begun != nullptr) {
      begun->done = std::make_shared<int>(0);
      begun->chunks = {{.experts = {0, 1}, .done = std::make_shared<int>(1)},
                       {.experts{1, 2}, .done{}}};
    }
    return {.rows = {.view = {}, .owner = memory(log_, "rows")}, .row_scales{}, .row_weights{}};
  }
  OwnedTensor gather_sum(const char* /*operation*/, const Plan& /*plan*/, const GatherSumArgs& args,
                         Begun* begun) override {
    if (args.out.given()) throw Error(ErrorCode::kCuda, "this path takes no output");
    if (begun != nullptr) begun->done = std::make_shared<int>(0);
    return {.view = {}, .owner = memory(log_, "out")};
  }
  CombineBackwardResult combine_backward(const Plan& /*plan*/,
                                         const CombineBackwardArgs& /*args*/) override {
    return {};
  }
  OwnedTensor collect_routes(const Plan& /*plan*/, ConstTensorView /*rows*/,
                             TensorView /*routes*/) override {
    return {};
  }
  OwnedTensor allocate_rows(const Plan& /*plan*/, DType /*dtype*/) override { return {}; }
  void agree_on(const Proposal& /*proposal*/) override {}
  std::vector<std::shared_ptr<const void>> owners_of(
      std::span<const ConstTensorView> tensors) const override {
    std::vector<std::shared_ptr<const void>> owners;
    for (const ConstTensorView& tensor : tensors) {
      if (tensor.given()) owners.push_back(memory(log_, "y"));
    }
    return owners;
  }
  void finish(const std::shared_ptr<const void>& done) override {
    if (done) log_->push_back("the stream waits");
  }
  void set_options(const DeviceOptions& /*options*/) override {}
  void check() override {}

 private:
  Log log_;
};

class LoggingStrategy final : public ForwardingStrategy {
 public:
  explicit LoggingStrategy(Log log)
      : ForwardingStrategy(make_strategy("direct")), log_(std::move(log)) {}
  std::unique_ptr<Path> make_device_path(const PathContext& /*context*/,
                                         Device /*device*/) const override {
    return std::make_unique<LoggingPath>(log_);
  }

 private:
  Log log_;
};

// Runs body(dispatcher, y, log) on one rank. body owns the dispatcher.
template <typename Body>
void run_logged(const Body& body) {
  run_ranks(1, [&](Group& group) {
    const auto log = std::make_shared<Events>();
    auto dispatcher = std::make_unique<Dispatcher>(
        group, DispatchConfig{.num_experts = 2, .top_k = 1, .width = 1},
        std::make_unique<LoggingStrategy>(log));
    int32_t nothing = 0;
    const ConstTensorView somewhere(&nothing, {1, 1}, {.kind = DeviceKind::kCuda, .index = 0});
    static_cast<void>(
        dispatcher->plan(Routing{.expert_ids = somewhere, .weights = somewhere, .mask = {}}));
    body(std::move(dispatcher), somewhere, *log);
  });
}

using Owned = std::unique_ptr<Dispatcher>;

const Events kWaitsFirst = {"the stream waits", "y is released", "out is released"};

TEST(Pending, KeepsItsInputsUntilItIsFinished) {
  run_logged([](const Owned& dispatcher, const ConstTensorView& y, const Events& log) {
    Pending<OwnedTensor> pending = dispatcher->begin_combine(Plan(), y);
    EXPECT_EQ(log, Events{});
    { const OwnedTensor out = dispatcher->finish(std::move(pending)); }
    EXPECT_EQ(log, kWaitsFirst);
  });
}

TEST(Pending, EndsItsCallWhenItIsDropped) {
  run_logged([](const Owned& dispatcher, const ConstTensorView& y, const Events& log) {
    { const Pending<OwnedTensor> dropped = dispatcher->begin_combine(Plan(), y); }
    EXPECT_EQ(log, kWaitsFirst);
  });
}

TEST(Pending, EndsItsCallWhenAnExceptionPasses) {
  run_logged([](const Owned& dispatcher, const ConstTensorView& y, const Events& log) {
    try {
      const Pending<OwnedTensor> pending = dispatcher->begin_combine(Plan(), y);
      throw std::runtime_error("between begin and finish");
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(log, kWaitsFirst);
  });
}

TEST(Pending, EndsItsCallWhenAnotherTakesItsPlace) {
  run_logged([](const Owned& dispatcher, const ConstTensorView& y, const Events& log) {
    Pending<OwnedTensor> pending = dispatcher->begin_combine(Plan(), y);
    pending = dispatcher->begin_combine(Plan(), y);
    EXPECT_NE(std::ranges::find(log, "the stream waits"), log.end());
    EXPECT_EQ(log.size(), kWaitsFirst.size());
    static_cast<void>(dispatcher->finish(std::move(pending)));
    EXPECT_EQ(log.size(), 2 * kWaitsFirst.size());
  });
}

// The dispatcher's destructor has waited for the GPU.
TEST(Pending, ReleasesItsMemoryAfterItsDispatcherIsGone) {
  run_logged([](Owned dispatcher, const ConstTensorView& y, const Events& log) {
    {
      const Pending<OwnedTensor> pending = dispatcher->begin_combine(Plan(), y);
      dispatcher.reset();
    }
    EXPECT_EQ(log, (Events{"the path is gone", "y is released", "out is released"}));
  });
}

TEST(Pending, EndsADispatchOfWhichOneChunkWasTaken) {
  run_logged([](const Owned& dispatcher, const ConstTensorView& x, const Events& log) {
    {
      Pending<DispatchResult> pending = dispatcher->begin_dispatch(Plan(), {.x = x});
      EXPECT_TRUE(dispatcher->next_chunk(pending));
      EXPECT_EQ(log, Events{"the stream waits"});
    }
    EXPECT_EQ(
        log, (Events{"the stream waits", "the stream waits", "y is released", "rows is released"}));
  });
}

TEST(Pending, HasNoMoreChunksOnceItIsFinished) {
  run_logged([](const Owned& dispatcher, const ConstTensorView& x, const Events& /*log*/) {
    Pending<DispatchResult> pending = dispatcher->begin_dispatch(Plan(), {.x = x});
    EXPECT_TRUE(dispatcher->next_chunk(pending));
    static_cast<void>(dispatcher->finish(std::move(pending)));
    EXPECT_FALSE(dispatcher->next_chunk(pending));  // NOLINT(bugprone-use-after-move)
  });
}

TEST(Pending, ThatCouldNotBeginKeepsNothing) {
  run_logged([](const Owned& dispatcher, const ConstTensorView& y, const Events& log) {
    int32_t nothing = 0;
    const TensorView out(&nothing, {1, 1}, y.device);
    EXPECT_THROW(static_cast<void>(dispatcher->begin_combine(Plan(), y, out)), Error);
    EXPECT_EQ(log, Events{});
  });
}

}  // namespace
}  // namespace crossdock
