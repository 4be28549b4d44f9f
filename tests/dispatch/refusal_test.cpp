#include <gtest/gtest.h>

#include <functional>
#include <new>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "crossdock/threads.hpp"
#include "dispatch/random_case.hpp"

namespace crossdock {
namespace {

constexpr int kRanks = 3;

const DispatchConfig kConfig{.num_experts = 4, .top_k = 2, .width = 3};

// Two tokens on every rank.
struct Tokens {
  std::vector<int32_t> ids = {0, 1, 2, 3};
  std::vector<float> weights = {1.0F, 2.0F, 3.0F, 4.0F};
  std::vector<float> x = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F};

  Routing routing() const {
    return {.expert_ids = {ids.data(), {2, 2}}, .weights = {weights.data(), {2, 2}}, .mask = {}};
  }
  ConstTensorView view() const { return {x.data(), {2, 3}}; }
};

// The message that every rank gets from `body`; the group must stay usable.
std::string agreed_message(ErrorCode code, const std::function<void(Group&)>& body) {
  std::vector<std::string> messages(kRanks, "nothing thrown");
  run_ranks(
      kRanks,
      [&](Group& group) {
        try {
          body(group);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), code) << error.what();
          messages[static_cast<size_t>(group.rank())] = error.what();
        }
        EXPECT_FALSE(group.is_poisoned());
        const Tokens tokens;
        Dispatcher dispatcher(group, kConfig, "alltoall");
        const Plan plan = dispatcher.plan(tokens.routing());
        const auto sent = dispatcher.dispatch(plan, {.x = tokens.view()});
        const auto out = dispatcher.combine(plan, sent.rows.view);
        EXPECT_EQ(out.view.as<float>()[5], 42.0F);
      },
      short_deadlines());
  for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
  return messages[0];
}

TEST(Refusal, ABadRouteOnOneRankIsTheSameErrorOnAll) {
  const auto message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    Tokens tokens;
    if (group.rank() == 1) tokens.ids[3] = 7;
    static_cast<void>(dispatcher.plan(tokens.routing()));
  });
  EXPECT_EQ(message, "rank 1: token 1, slot 1: expert id 7 must be in [0, 4), or -1 for no route");
}

TEST(Refusal, AWrongConfigurationIsRefusedAtTheFirstPlanByAll) {
  const auto message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    DispatchConfig config = kConfig;
    if (group.rank() == 2) config.top_k = 5;
    Dispatcher dispatcher(group, config, "alltoall");
    static_cast<void>(dispatcher.plan(Tokens().routing()));
  });
  EXPECT_EQ(message, "rank 2: num_experts (4) must be at least top_k (5)");
}

TEST(Refusal, AnUnknownStrategyNamesTheKnownOnes) {
  const auto message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, group.rank() == 0 ? "teleport" : "alltoall");
    if (group.rank() == 0) {
      EXPECT_THROW(dispatcher.strategy(), Error);
    }
    static_cast<void>(dispatcher.plan(Tokens().routing()));
  });
  EXPECT_NE(message.find("rank 0: strategy must be one of allgather, alltoall"), std::string::npos);
  EXPECT_NE(message.find("got \"teleport\""), std::string::npos);
}

TEST(Refusal, EverySettingMustBeAlikeOnAllRanks) {
  struct Setting {
    std::string words;
    std::function<void(DispatchConfig&)> change;
  };
  const std::vector<Setting> settings = {
      {"num_experts=5", [](DispatchConfig& c) { c.num_experts = 5; }},
      {"width=4", [](DispatchConfig& c) { c.width = 4; }},
      {"alignment=8", [](DispatchConfig& c) { c.alignment = 8; }},
      {"capacity_factor=2.0000000000009", [](DispatchConfig& c) { c.capacity->factor += 0x1p-40; }},
      {"capacity_factor=none", [](DispatchConfig& c) { c.capacity.reset(); }},
      {"drop_policy=weight", [](DispatchConfig& c) { c.capacity->policy = DropPolicy::kWeight; }},
      {"pad_to_capacity=0", [](DispatchConfig& c) { c.capacity->pad_to_capacity = false; }},
      {"max_tokens=3", [](DispatchConfig& c) { c.capacity->max_tokens = 3; }},
      {"placement=0,1,2,2",
       [](DispatchConfig& c) {
         c.placement = {0, 1, 2, 2};
       }},
      {"partial_sums=none", [](DispatchConfig& c) { c.partial_sums = PartialSums::kNone; }},
      {"partial_sums=rows", [](DispatchConfig& c) { c.partial_sums = PartialSums::kRowType; }},
      {"nonfinite=propagate", [](DispatchConfig& c) { c.nonfinite = NonFinite::kPropagate; }},
      {"max_rows=101", [](DispatchConfig& c) { c.max_rows = 101; }}};
  for (const Setting& setting : settings) {
    const auto message = agreed_message(ErrorCode::kMismatch, [&](Group& group) {
      DispatchConfig config = kConfig;
      config.capacity = {
          .factor = 2, .policy = DropPolicy::kPosition, .pad_to_capacity = true, .max_tokens = 2};
      config.max_rows = 100;
      config.partial_sums = PartialSums::kF32;
      if (group.rank() == 2) setting.change(config);
      Dispatcher dispatcher(group, config, "alltoall");
      static_cast<void>(dispatcher.plan(Tokens().routing()));
    });
    EXPECT_NE(message.find("rank 2 has " + setting.words), std::string::npos) << message;
  }
  const auto message = agreed_message(ErrorCode::kMismatch, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, group.rank() == 2 ? "direct" : "alltoall");
    static_cast<void>(dispatcher.plan(Tokens().routing()));
  });
  EXPECT_NE(message.find("rank 2 has strategy=direct"), std::string::npos) << message;
}

TEST(Refusal, SizesThatCannotBeCountedAreRefusedByAll) {
  struct Setting {
    std::string message;
    std::function<void(DispatchConfig&)> change;
  };
  static constexpr int64_t kHuge = int64_t{1} << 62;
  const auto pads = [](int64_t max_tokens) {
    return Capacity{.factor = 2,
                    .policy = DropPolicy::kPosition,
                    .pad_to_capacity = true,
                    .max_tokens = max_tokens};
  };
  const std::vector<Setting> settings = {
      {"width must be in [1, 2147483647], got 4611686018427387904",
       [](DispatchConfig& c) { c.width = kHuge; }},
      {"max_rows (4611686018427387904) rows of width 3 are more than can be counted",
       [](DispatchConfig& c) { c.max_rows = kHuge; }},
      {"asks for 4611686018427387903 rows per expert and rank, more than can be counted",
       [&](DispatchConfig& c) { c.capacity = pads(kHuge); }},
      {"asks for 1099511627776 rows per expert and rank, more than can be counted",
       [&](DispatchConfig& c) {
         c.capacity = pads(int64_t{1} << 40);
         c.width = 1 << 20;
       }},
      {" ranks; a rank can have at most 2147483647 rows in all: reduce max_tokens to the largest "
       "number of tokens of any rank",
       [&](DispatchConfig& c) { c.capacity = pads(int64_t{1} << 40); }}};
  for (const Setting& setting : settings) {
    for (const char* strategy : {"direct", "alltoall"}) {
      const auto message = agreed_message(ErrorCode::kInvalidArgument, [&](Group& group) {
        DispatchConfig config = kConfig;
        setting.change(config);
        Dispatcher dispatcher(group, config, strategy);
        static_cast<void>(dispatcher.plan(Tokens().routing()));
      });
      EXPECT_NE(message.find(setting.message), std::string::npos) << message;
    }
  }
}

TEST(Refusal, TooManyRowsAreAnAgreedErrorWithTheSizeNeeded) {
  const auto message = agreed_message(ErrorCode::kCapacity, [](Group& group) {
    DispatchConfig config = kConfig;
    config.max_rows = 5;
    Dispatcher dispatcher(group, config, "allgather");
    static_cast<void>(dispatcher.plan(Tokens().routing()));
  });
  EXPECT_EQ(message,
            "rank 0 would receive 6 rows, more than max_rows (5); max_rows must be at least 6");
}

TEST(Refusal, AWrongTensorOnOneRankIsTheSameErrorOnAll) {
  auto message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    const Tokens tokens;
    const Plan plan = dispatcher.plan(tokens.routing());
    ConstTensorView x = tokens.view();
    if (group.rank() == 2) x = {tokens.x.data(), {3, 2}};
    dispatcher.dispatch(plan, {.x = x});
  });
  EXPECT_EQ(message, "rank 2: x must be [2, 3], got [3, 2] fp32");
  message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    const Tokens tokens;
    const Plan plan = dispatcher.plan(tokens.routing());
    dispatcher.dispatch(plan, {.x = {tokens.x.data(), DType::kI32, {2, 3}}});
  });
  EXPECT_EQ(message, "rank 0: x must be fp64, fp32, bf16, fp16 or fp8_e4m3, got int32");
  message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    const Plan plan = dispatcher.plan(Tokens().routing());
    const auto y = dispatcher.allocate_rows(plan, DType::kF8E4M3);
    static_cast<void>(dispatcher.combine(plan, y.view));
  });
  EXPECT_EQ(message, "rank 0: rows must be fp64, fp32, bf16 or fp16, got fp8_e4m3");
  message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    const Plan plan = dispatcher.plan(Tokens().routing());
    const auto y = dispatcher.allocate_rows(plan, DType::kF64);
    static_cast<void>(dispatcher.combine(plan, y.view));
  });
  EXPECT_EQ(message, "rank 0: weights must be fp64 with rows of fp64; the plan was made with fp32");
}

TEST(Refusal, AWrongDtypeOfABackwardIsTheSameErrorOnAll) {
  auto message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    const Tokens tokens;
    const Plan plan = dispatcher.plan(tokens.routing());
    const auto y = dispatcher.allocate_rows(plan, group.rank() == 1 ? DType::kBF16 : DType::kF32);
    static_cast<void>(dispatcher.combine_backward(plan, tokens.view(), y.view));
  });
  EXPECT_EQ(message, "rank 1: y and grad_out must have the same dtype, got bf16 and fp32");
  message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    const Plan plan = dispatcher.plan(Tokens().routing());
    const std::vector<float> rows(static_cast<size_t>(plan.num_rows()));
    const DType dtype = group.rank() == 1 ? DType::kBF16 : DType::kF32;
    static_cast<void>(dispatcher.collect_routes(plan, {rows.data(), dtype, {plan.num_rows()}}));
  });
  EXPECT_EQ(message, "rank 1: rows must be fp32 or fp64, got bf16");
}

TEST(Refusal, ADtypeOfOneRankAloneIsAMismatch) {
  const auto message = agreed_message(ErrorCode::kMismatch, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    const Tokens tokens;
    const Plan plan = dispatcher.plan(tokens.routing());
    const std::vector<BF16> small(6);
    ConstTensorView x = tokens.view();
    if (group.rank() == 1) x = {small.data(), {2, 3}};
    dispatcher.dispatch(plan, {.x = x});
  });
  EXPECT_NE(message.find("dtype"), std::string::npos) << message;
}

TEST(Refusal, APlanBelongsToItsDispatcher) {
  auto message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher maker(group, kConfig, "alltoall");
    Dispatcher other(group, kConfig, "alltoall");
    const Tokens tokens;
    other.dispatch(maker.plan(tokens.routing()), {.x = tokens.view()});
  });
  EXPECT_EQ(message, "rank 0: the plan was made by another dispatcher; use the one that made it");
  message = agreed_message(ErrorCode::kInvalidArgument, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    static_cast<void>(dispatcher.combine(Plan(), Tokens().view()));
  });
  EXPECT_EQ(message, "rank 0: the plan is empty or closed; make one with Dispatcher::plan");
}

TEST(Refusal, RanksAtDifferentPlansAreAMismatch) {
  const auto message = agreed_message(ErrorCode::kMismatch, [](Group& group) {
    Dispatcher dispatcher(group, kConfig, "alltoall");
    const Tokens tokens;
    const Plan first = dispatcher.plan(tokens.routing());
    const Plan second = dispatcher.plan(tokens.routing());
    dispatcher.dispatch(group.rank() == 0 ? first : second, {.x = tokens.view()});
  });
  EXPECT_NE(message, "nothing thrown");
}

// Fails on one rank after the ranks have agreed, in this member for this operation.
struct Failure {
  std::string_view member;
  std::string_view operation;
  PartialSums partial_sums = PartialSums::kNone;
};

class FailsOnRankOne : public ForwardingStrategy {
 public:
  FailsOnRankOne(const std::string& name, const Failure& failure)
      : ForwardingStrategy(make_strategy(name)), failure_(failure) {}

  std::shared_ptr<const void> prepare(const StrategyCall& call) override {
    pass("prepare", call);
    return inner().prepare(call);
  }
  void scatter(const StrategyCall& call, std::span<const RowPart> parts) override {
    pass("scatter", call);
    inner().scatter(call, parts);
  }
  void gather_sum(const StrategyCall& call, const GatherSumArgs& args) override {
    pass("gather_sum", call);
    inner().gather_sum(call, args);
  }
  void gather_partial_sums(const StrategyCall& call, const GatherSumArgs& args) override {
    pass("gather_partial_sums", call);
    inner().gather_partial_sums(call, args);
  }
  void scatter_routes(const StrategyCall& call, ConstTensorView routes, TensorView rows) override {
    pass("scatter_routes", call);
    inner().scatter_routes(call, routes, rows);
  }
  void gather_routes(const StrategyCall& call, ConstTensorView rows, TensorView routes) override {
    pass("gather_routes", call);
    inner().gather_routes(call, rows, routes);
  }

 private:
  void pass(std::string_view member, const StrategyCall& call) const {
    const bool is_due = member == failure_.member && call.operation == failure_.operation;
    if (is_due && call.group.rank() == 1) throw std::bad_alloc();
  }

  Failure failure_;
};

void run_all_calls(Dispatcher& dispatcher) {
  const Tokens tokens;
  const Plan plan = dispatcher.plan(tokens.routing());
  const DispatchResult sent =
      dispatcher.dispatch(plan, {.x = tokens.view(), .with_row_weights = true});
  static_cast<void>(dispatcher.combine(plan, sent.rows.view));
  static_cast<void>(dispatcher.combine_backward(plan, tokens.view(), sent.rows.view));
  static_cast<void>(dispatcher.dispatch_backward(plan, sent.rows.view));
  static_cast<void>(dispatcher.collect_routes(plan, sent.row_weights.view));
}

TEST(Refusal, AFailureInsideACallReleasesThePeersAndPoisonsTheGroup) {
  const std::vector<Failure> failures = {
      {"prepare", "plan"},
      {"scatter", "dispatch"},
      {"scatter_routes", "dispatch"},
      {"gather_sum", "combine"},
      {"gather_partial_sums", "combine", PartialSums::kF32},
      {"scatter", "combine_backward"},
      {"scatter_routes", "combine_backward"},
      {"gather_routes", "combine_backward"},
      {"gather_sum", "dispatch_backward"},
      {"gather_routes", "collect_routes"},
  };
  for (const std::string& strategy : strategy_names()) {
    for (const Failure& failure : failures) {
      SCOPED_TRACE(concat(strategy, ", ", failure.member, " in ", failure.operation));
      run_ranks(
          kRanks,
          [&](Group& group) {
            DispatchConfig config = kConfig;
            config.partial_sums = failure.partial_sums;
            Dispatcher dispatcher(group, config,
                                  std::make_unique<FailsOnRankOne>(strategy, failure));
            std::string message = "nothing thrown";
            try {
              run_all_calls(dispatcher);
            } catch (const Error& error) {
              message = error.what();
              EXPECT_EQ(error.context().culprit, 1) << message;
              EXPECT_EQ(error.context().operation, failure.operation) << message;
            }
            EXPECT_NE(message.find("not enough memory"), std::string::npos) << message;
            EXPECT_TRUE(group.is_poisoned());
            EXPECT_THROW(static_cast<void>(dispatcher.plan(Tokens().routing())), Error);
          },
          short_deadlines());
    }
  }
}

}  // namespace
}  // namespace crossdock
