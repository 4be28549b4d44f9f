// A user's own strategies among the candidates.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "crossdock/crossdock.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "dispatch/random_case.hpp"

namespace crossdock {
namespace {

const DispatchConfig kConfig{.num_experts = 64, .top_k = 8, .width = 16};

// A model that claims a fraction of alltoall's traffic.
class PartialModel final : public StrategyModel {
 public:
  explicit PartialModel(double part) : part_(part) {}
  LinkFlow flow(Movement movement, const RouteSums& sums, const Topology& topology) const override {
    LinkFlow flow = StrategyModel::flow(movement, sums, topology);
    for (auto* rows :
         {&flow.sent_within, &flow.sent_between, &flow.received_within, &flow.received_between}) {
      for (double& one : *rows) one *= part_;
    }
    return flow;
  }
  double memory_traffic(Movement movement, const StepSizes& sizes,
                        const StrategyJob& job) const override {
    return part_ * StrategyModel::memory_traffic(movement, sizes, job);
  }

 private:
  double part_;
};

class Mine final : public ForwardingStrategy {
 public:
  Mine(std::string name, double part)
      : ForwardingStrategy(make_strategy("alltoall")), name_(std::move(name)), model_(part) {}
  std::string_view name() const override { return name_; }
  const StrategyModel& model() const override { return model_; }

 private:
  std::string name_;
  PartialModel model_;
};

StrategyList with_mine(double part, const std::string& name = "mine") {
  StrategyList list = built_in_strategies();
  list.add([name, part] { return std::make_unique<Mine>(name, part); });
  return list;
}

// The strategies that "auto" chose on the ranks, after each has dispatched a token with it.
std::set<std::string> chosen_on(int ranks_per_node, const StrategyList& candidates) {
  ThreadOptions options = short_deadlines();
  options.ranks_per_node = ranks_per_node;
  std::mutex mutex;
  std::set<std::string> names;
  run_ranks(
      4,
      [&](Group& group) {
        Dispatcher dispatcher(group, kConfig, "auto", candidates);
        const std::vector<int32_t> ids = {0, 9, 18, 27, 36, 45, 54, 63};
        const std::vector<float> weights(8, 0.125f);
        const std::vector<float> x(16, static_cast<float>(group.rank()));
        const Plan plan =
            dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {1, 8}),
                                    .weights = ConstTensorView(weights.data(), {1, 8})});
        DispatchArgs args;
        args.x = ConstTensorView(x.data(), {1, 16});
        const DispatchResult rows = dispatcher.dispatch(plan, args);
        const OwnedTensor out = dispatcher.combine(plan, rows.rows.view);
        EXPECT_EQ(out.view.as<float>()[7], static_cast<float>(group.rank()));
        const std::lock_guard lock(mutex);
        names.insert(std::string(dispatcher.strategy().name()));
      },
      options);
  return names;
}

void expect_error(const std::function<void()>& call, ErrorCode code, const std::string& text) {
  try {
    call();
    FAIL() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Auto, IsTheSameOnEveryRank) {
  EXPECT_EQ(chosen_on(0, built_in_strategies()), std::set<std::string>{"direct"});
  EXPECT_EQ(chosen_on(2, built_in_strategies()), std::set<std::string>{"hierarchical"});
}

TEST(Candidates, AutoChoosesACheaperStrategyOfTheUserOnAllRanks) {
  EXPECT_EQ(chosen_on(0, with_mine(0.1)), std::set<std::string>{"mine"});
  EXPECT_EQ(chosen_on(2, with_mine(0.1)), std::set<std::string>{"mine"});
  EXPECT_EQ(chosen_on(2, with_mine(3.0)), std::set<std::string>{"hierarchical"});
}

TEST(Candidates, OfTwoThatCostTheSameTheEarlierIsChosen) {
  StrategyList list;
  for (const std::string name : {"second", "first"}) {
    list.add([name] { return std::make_unique<Mine>(name, 0.5); });
  }
  EXPECT_EQ(resolve_strategy("auto", kConfig, Topology::uniform(8, 4), list).name, "second");
}

TEST(Candidates, OneAloneIsChosenAndItsReasonNamesNoOther) {
  StrategyList list;
  list.add([] { return make_strategy("allgather"); });
  const CostInputs inputs{.config = kConfig, .topology = Topology::uniform(8, 4), .tokens = 100};
  const StrategyChoice choice = choose_strategy(inputs, estimate_costs(inputs, list).strategies);
  EXPECT_EQ(choice.name, "allgather");
  EXPECT_EQ(choice.reason, "dispatch sends 4 rows per token between nodes and 3 inside them");
}

TEST(Candidates, AreInThePlanOfAJob) {
  JobDescription job{.width = 2048, .num_experts = 128, .top_k = 8};
  job.tokens = 4096;
  job.nodes = 2;
  job.ranks_per_node = 8;
  const JobPlan plan = plan_job(job, with_mine(0.1));
  EXPECT_EQ(plan.choice.name, "mine");
  ASSERT_EQ(plan.costs.strategies.size(), 5u);
  EXPECT_EQ(plan.costs.strategies[4].name, "mine");
  EXPECT_NEAR(plan.costs.strategies[4].dispatch.bytes.between_nodes,
              0.1 * plan.costs.strategies[1].dispatch.bytes.between_nodes, 1.0);
}

TEST(Candidates, OtherOnesOnOneRankAreAnAgreedError) {
  const auto errors = try_ranks(
      3,
      [&](Group& group) {
        // Every rank would choose "mine".
        StrategyList list = with_mine(0.1);
        if (group.rank() == 1) list.add([] { return std::make_unique<Mine>("other", 9.0); });
        Dispatcher dispatcher(group, kConfig, "auto", list);
        const Plan plan = dispatcher.plan(
            Routing{.expert_ids = ConstTensorView(static_cast<const int32_t*>(nullptr), {0, 8}),
                    .weights = ConstTensorView(static_cast<const float*>(nullptr), {0, 8})});
      },
      short_deadlines());
  for (const std::exception_ptr& error : errors) {
    ASSERT_TRUE(error);
    expect_error([&] { std::rethrow_exception(error); }, ErrorCode::kMismatch, "candidates");
  }
}

TEST(Candidates, CanBeNamed) {
  run_ranks(2, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "mine", with_mine(1.0));
    EXPECT_EQ(dispatcher.strategy().name(), "mine");
    Dispatcher wrong(group, kConfig, "yours", with_mine(1.0));
    expect_error([&] { wrong.strategy(); }, ErrorCode::kInvalidArgument,
                 "allgather, alltoall, direct, hierarchical, mine");
  });
}

TEST(Candidates, OfALayerAreThoseOfItsOptions) {
  run_ranks(2, [](Group& group) {
    MoeLayerConfig config;
    config.router = {.num_experts = 8, .top_k = 2, .width = 16};
    config.experts.inner = 8;
    const MoeLayer layer(group, config, {.candidates = with_mine(0.1)});
    EXPECT_EQ(layer.config().strategy, "mine");
  });
}

TEST(Candidates, RefuseANameThatIsTakenOrCannotBeGiven) {
  StrategyList list = built_in_strategies();
  const auto add = [&](const std::string& name) {
    list.add([name] { return std::make_unique<Mine>(name, 1.0); });
  };
  expect_error([&] { add("direct"); }, ErrorCode::kInvalidArgument, "already has a strategy");
  expect_error([&] { add("auto"); }, ErrorCode::kInvalidArgument, "got \"auto\"");
  expect_error([&] { add("a,b"); }, ErrorCode::kInvalidArgument, "got \"a,b\"");
  EXPECT_EQ(list.names().size(), 4u);
}

TEST(Candidates, AreIndependentOfOtherLists) {
  with_mine(1.0);
  EXPECT_EQ(built_in_strategies().names(),
            (std::vector<std::string>{"direct", "hierarchical", "alltoall", "allgather"}));
}

TEST(Candidates, NoneIsAnError) {
  JobDescription job{.width = 16, .num_experts = 8, .top_k = 2};
  job.tokens = 10;
  expect_error([&] { plan_job(job, {}); }, ErrorCode::kInvalidArgument, "at least one strategy");
  expect_error([] { resolve_strategy("auto", kConfig, Topology::single_node(2), {}); },
               ErrorCode::kInvalidArgument, "at least one strategy");
}

}  // namespace
}  // namespace crossdock
