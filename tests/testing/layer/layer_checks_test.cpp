// The layer checks of `crossdock verify` must detect wrong layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "crossdock/testing/layer_worlds.hpp"
#include "crossdock/threads.hpp"
#include "testing/conformance/faulty_strategy.hpp"

namespace crossdock::conformance {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

StrategyFactory faulty(const Faults& faults) {
  return [faults] { return std::make_unique<FaultyStrategy>(make_strategy("direct"), faults); };
}

Check check_named(const std::string& name) {
  for (Check& check : list_layer_checks({DType::kF32})) {
    if (check.name == name) return check;
  }
  ADD_FAILURE() << name;
  return {};
}

// The findings of all ranks.
Findings findings_of(const std::string& name, const StrategyFactory& strategy) {
  const Check check = check_named(name);
  Findings all;
  std::mutex mutex;
  run_ranks(2, [&](Group& group) {
    const Findings own = check.body(group, strategy);
    const std::lock_guard lock(mutex);
    all.insert(all.end(), own.begin(), own.end());
  });
  return all;
}

TEST(LayerChecks, PassWhatIsRight) {
  EXPECT_THAT(findings_of("layer/chosen/fp32/geglu", [] { return make_strategy("direct"); }),
              ::testing::IsEmpty());
}

TEST(LayerChecks, SeeAWrongSum) {
  const auto spoil = [](Strategy& inner, const StrategyCall& call, const GatherSumArgs& args) {
    inner.gather_sum(call, args);
    args.out.as<float>()[0] += 1e-3f;
  };
  const auto findings = findings_of("layer/chosen/fp32/geglu", faulty({.sum = spoil}));
  EXPECT_THAT(findings, Contains(AllOf(HasSubstr("rank 1: out, value 0"), HasSubstr("must be"))));
  EXPECT_THAT(findings, Contains(HasSubstr("rank 0: grad_x, value 0")));
}

TEST(LayerChecks, SeeAWrongGradientOfAWeight) {
  const auto spoil = [](const StrategyCall&, TensorView routes) { routes.as<float>()[0] += 1.0f; };
  const auto findings =
      findings_of("layer/chosen/fp32/geglu", faulty({.after_gather_routes = spoil}));
  EXPECT_THAT(findings, Contains(HasSubstr("grad_gate")));
  EXPECT_THAT(findings, ::testing::Not(Contains(HasSubstr(": out"))));
}

}  // namespace
}  // namespace crossdock::conformance
