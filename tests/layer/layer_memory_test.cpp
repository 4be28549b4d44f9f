// Memory runs out while one rank computes, during an exchange or between two: all ranks end in the
// same error, and the others continue without that rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>

#include "layer/layer_cases.hpp"
#include "support/missing_memory.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kCulprit = 1;
constexpr int64_t kInner = 640;
constexpr int64_t kSharedInner = 1000;
constexpr int64_t kValueBytes = 8;  // fp64

// The culprit has the most experts and one token less than the others, so only it requests buffers
// of certain sizes.
LayerCase make_uneven_case(const std::string& strategy, int64_t overlap_chunks) {
  LayerCaseOptions options = list_layer_cases(kRanks)[0].options;
  options.config.strategy = strategy;
  options.config.overlap_chunks = overlap_chunks;
  options.config.experts.inner = kInner;
  options.config.shared_inner = kSharedInner;
  options.config.dispatch.placement = {1, 0, 1, 1, 2, 1};
  options.tokens_per_rank = {6, 5, 6};
  return make_case(options);
}

enum class Pass { kForward, kBackward };

// In this pass the culprit's allocations of `num_values` values fail after the first `num_granted`.
struct Shortage {
  Pass pass;
  int64_t num_values;
  int64_t num_granted = 0;
};

void run_short_of_memory(Group& group, const LayerCase& layer_case, const Shortage& shortage) {
  LayerOnRank rank(group, layer_case);
  std::optional<MissingMemory> missing;
  const auto begin = [&](Pass pass) {
    group.agree({.operation = "begin", .config = {}, .body = {}});  // no rank is in the other pass
    if (pass == shortage.pass && group.rank() == kCulprit) {
      missing.emplace(shortage.num_values * kValueBytes, shortage.num_granted);
    }
    group.agree({.operation = "begin", .config = {}, .body = {}});
  };
  begin(Pass::kForward);
  MoeForwardResult forward = rank.forward();
  begin(Pass::kBackward);
  rank.backward(forward.saved);
}

void expect_others_go_on(Group& group) {
  if (group.rank() == kCulprit) return;
  const std::unique_ptr<Group> others = group.subgroup(std::vector<int>{0, 2});
  const LayerCase layer_case = make_case(list_layer_cases(2)[0].options);
  const RankResult result = run_layer(*others, layer_case);
  EXPECT_EQ(find_difference(result, run_reference(layer_case)[static_cast<size_t>(others->rank())],
                            1e-11),
            "");
}

void expect_same_error_everywhere(const LayerCase& layer_case, const Shortage& shortage) {
  std::vector<std::string> messages(kRanks, "nothing was thrown");
  run_ranks(kRanks,
            [&](Group& group) {
              std::string& message = messages[static_cast<size_t>(group.rank())];
              try {
                run_short_of_memory(group, layer_case, shortage);
              } catch (const Error& error) {
                message = error.what();
                EXPECT_EQ(error.context().culprit, kCulprit) << message;
              }
              EXPECT_TRUE(group.is_poisoned()) << message;
              expect_others_go_on(group);
            },
            {.group = {.arrival_deadline = std::chrono::seconds(20),
                       .progress_deadline = std::chrono::seconds(20)}});
  EXPECT_GT(MissingMemory::num_refused(), 0) << "the test must be about a buffer that is needed";
  for (const std::string& message : messages) {
    EXPECT_THAT(message, HasSubstr("not enough memory"));
    const size_t place = message.find("not enough memory");
    EXPECT_EQ(message.substr(place), messages[0].substr(messages[0].find("not enough memory")));
  }
}

// Rows that arrive at each rank.
std::vector<int64_t> count_rows(const LayerCase& layer_case) {
  std::vector<int64_t> rows(kRanks);
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    const MoeForwardResult result = rank.forward();
    rows[static_cast<size_t>(group.rank())] = result.saved.decision.plan.num_rows();
  });
  return rows;
}

void expect_same_error_with_every_strategy(const Shortage& shortage) {
  for (const std::string& strategy : strategy_names()) {
    for (const int64_t overlap_chunks : {1, 2, 4}) {
      SCOPED_TRACE(strategy + ", " + std::to_string(overlap_chunks) + " chunks");
      expect_same_error_everywhere(make_uneven_case(strategy, overlap_chunks), shortage);
    }
  }
}

// The activation of the culprit's rows, [R, F]: a size that no other rank requests.
int64_t count_activations() {
  const std::vector<int64_t> rows = count_rows(make_uneven_case("alltoall", 1));
  for (const int rank : {0, 2}) {
    const int64_t others = rows[static_cast<size_t>(rank)];
    EXPECT_TRUE(others != rows[kCulprit] && 2 * others != rows[kCulprit]) << "use other tokens";
  }
  return rows[kCulprit] * kInner;
}

TEST(MoeLayerMemory, MissingForTheExpertsOfAForwardIsTheSameErrorEverywhere) {
  expect_same_error_with_every_strategy(
      {.pass = Pass::kForward, .num_values = count_activations()});
}

TEST(MoeLayerMemory, MissingForTheExpertsOfABackwardIsTheSameErrorEverywhere) {
  // First for values kept for the weight gradients, then for values computed during the exchange.
  for (const int64_t num_granted : {0, 1}) {
    expect_same_error_with_every_strategy(
        {.pass = Pass::kBackward, .num_values = count_activations(), .num_granted = num_granted});
  }
}

TEST(MoeLayerMemory, MissingForTheSharedExpertsOfAForwardIsTheSameErrorEverywhere) {
  expect_same_error_with_every_strategy(  // the activation
      {.pass = Pass::kForward, .num_values = 5 * kSharedInner});
}

TEST(MoeLayerMemory, MissingForTheSharedExpertsOfABackwardIsTheSameErrorEverywhere) {
  expect_same_error_with_every_strategy(  // the gradient of the hidden rows
      {.pass = Pass::kBackward, .num_values = 10 * kSharedInner});
}

}  // namespace
}  // namespace crossdock
