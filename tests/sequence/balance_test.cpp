#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "crossdock/sequence.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using testing::ElementsAre;
using Lengths = std::vector<int64_t>;

double cost_of(const BalanceArgs& args, int64_t length) {
  const auto l = static_cast<double>(length);
  return args.cost_per_token * l + args.cost_per_token_pair * l * l;
}

/// Every sequence is assigned once, and the costs match the assignment.
void expect_sound(const BalanceArgs& args, const SequenceBalance& balance) {
  Lengths all = balance.sequences;
  std::ranges::sort(all);
  Lengths wanted(args.lengths.size());
  std::iota(wanted.begin(), wanted.end(), 0);
  EXPECT_EQ(all, wanted);
  ASSERT_EQ(std::ssize(balance.offsets), args.num_ranks + 1);
  double largest = 0.0;
  double total = 0.0;
  for (int rank = 0; rank < args.num_ranks; ++rank) {
    const auto own = balance.of_rank(rank);
    EXPECT_TRUE(std::ranges::is_sorted(own));
    int64_t tokens = 0;
    double cost = 0.0;
    for (const int64_t s : own) {
      tokens += args.lengths[static_cast<size_t>(s)];
      cost += cost_of(args, args.lengths[static_cast<size_t>(s)]);
    }
    EXPECT_EQ(balance.tokens_per_rank[static_cast<size_t>(rank)], tokens);
    EXPECT_DOUBLE_EQ(balance.cost_per_rank[static_cast<size_t>(rank)], cost);
    largest = std::max(largest, cost);
    total += cost;
  }
  EXPECT_DOUBLE_EQ(balance.imbalance, total > 0 ? largest / (total / args.num_ranks) : 1.0);
}

/// The smallest maximum over all contiguous ranges of lengths[first, N) on num_ranks ranks.
double best_in_order(const BalanceArgs& args, size_t first, int num_ranks) {
  double sum = 0.0;
  if (num_ranks == 1) {
    for (size_t s = first; s < args.lengths.size(); ++s) sum += cost_of(args, args.lengths[s]);
    return sum;
  }
  double best = best_in_order(args, first, num_ranks - 1);  // this rank has none
  for (size_t s = first; s < args.lengths.size(); ++s) {
    sum += cost_of(args, args.lengths[s]);
    best = std::min(best, std::max(sum, best_in_order(args, s + 1, num_ranks - 1)));
  }
  return best;
}

/// The smallest maximum over all assignments.
double best_of_all(const BalanceArgs& args, size_t next, std::vector<double>& loads) {
  if (next == args.lengths.size()) return std::ranges::max(loads);
  double best = std::numeric_limits<double>::infinity();
  for (double& load : loads) {
    const double before = load;
    load += cost_of(args, args.lengths[next]);
    best = std::min(best, best_of_all(args, next + 1, loads));
    load = before;
  }
  return best;
}

/// Calls body with small random cases, some sequences empty, some costs quadratic.
void for_small_cases(BalancePolicy policy, const std::function<void(const BalanceArgs&)>& body) {
  std::mt19937 random(5);
  for (int i = 0; i < 150; ++i) {
    Lengths lengths(random() % 7);
    for (int64_t& length : lengths)
      length = std::max<int64_t>(0, static_cast<int64_t>(random() % 24) - 3);
    body({.lengths = lengths,
          .num_ranks = 1 + static_cast<int>(random() % 4),
          .policy = policy,
          .cost_per_token = i % 5 == 0 ? 0.1 : 1.0,
          .cost_per_token_pair = i % 3 == 0 ? 0.03125 : 0.0});
  }
}

TEST(BalanceSequences, InOrderIsOptimal) {
  for_small_cases(BalancePolicy::kKeepOrder, [](const BalanceArgs& args) {
    const SequenceBalance balance = balance_sequences(args);
    expect_sound(args, balance);
    EXPECT_TRUE(std::ranges::is_sorted(balance.sequences));  // ranges in the given order
    EXPECT_DOUBLE_EQ(std::ranges::max(balance.cost_per_rank),
                     best_in_order(args, 0, args.num_ranks));
  });
}

TEST(BalanceSequences, LongestFirstIsWithinFourThirdsOfTheOptimum) {
  for_small_cases(BalancePolicy::kLongestFirst, [](const BalanceArgs& args) {
    const SequenceBalance balance = balance_sequences(args);
    expect_sound(args, balance);
    std::vector<double> loads(static_cast<size_t>(args.num_ranks));
    const double best = best_of_all(args, 0, loads);
    EXPECT_LE(std::ranges::max(balance.cost_per_rank), best * 4.0 / 3.0 + 1e-9);
  });
}

TEST(BalanceSequences, OfManyAreNearlyEven) {
  std::mt19937 random(3);
  Lengths lengths(2000);
  for (int64_t& length : lengths) length = 1 + static_cast<int64_t>(random() % 4096);
  const BalanceArgs args{.lengths = lengths, .num_ranks = 16};
  const SequenceBalance longest = balance_sequences(args);
  expect_sound(args, longest);
  EXPECT_LT(longest.imbalance, 1.001);
  BalanceArgs in_order = args;
  in_order.policy = BalancePolicy::kKeepOrder;
  const SequenceBalance kept = balance_sequences(in_order);
  expect_sound(in_order, kept);
  EXPECT_LT(kept.imbalance, 1.03);
}

TEST(BalanceSequences, TheAttentionTermSeparatesLongSequences) {
  const Lengths lengths = {100, 50, 50};
  BalanceArgs args{.lengths = lengths, .num_ranks = 2};
  EXPECT_DOUBLE_EQ(balance_sequences(args).imbalance, 1.0);
  args.cost_per_token = 0.0;
  args.cost_per_token_pair = 1.0;
  const SequenceBalance squared = balance_sequences(args);
  EXPECT_THAT(squared.of_rank(0), ElementsAre(0));
  EXPECT_THAT(squared.of_rank(1), ElementsAre(1, 2));
  EXPECT_DOUBLE_EQ(squared.imbalance, 10000.0 / 7500.0);
  EXPECT_THAT(squared.tokens_per_rank, ElementsAre(100, 100));
}

TEST(BalanceSequences, RanksMayOutnumberSequences) {
  const Lengths lengths = {3, 0, 5};
  for (const auto policy : {BalancePolicy::kLongestFirst, BalancePolicy::kKeepOrder}) {
    const BalanceArgs args{.lengths = lengths, .num_ranks = 5, .policy = policy};
    const SequenceBalance balance = balance_sequences(args);
    expect_sound(args, balance);
    EXPECT_EQ(std::ranges::max(balance.tokens_per_rank), 5);
    EXPECT_DOUBLE_EQ(balance.imbalance, 5.0 / (8.0 / 5.0));
  }
}

TEST(BalanceSequences, NoRankIsLeftOutWithoutNeed) {
  const Lengths lengths = {10, 1, 1, 1};
  const SequenceBalance balance =
      balance_sequences({.lengths = lengths, .num_ranks = 4, .policy = BalancePolicy::kKeepOrder});
  EXPECT_THAT(balance.tokens_per_rank, ElementsAre(10, 1, 1, 1));
}

TEST(BalanceSequences, NothingIsBalanced) {
  for (const auto policy : {BalancePolicy::kLongestFirst, BalancePolicy::kKeepOrder}) {
    const Lengths zeros(4, 0);
    const BalanceArgs empty{.lengths = zeros, .num_ranks = 2, .policy = policy};
    expect_sound(empty, balance_sequences(empty));
    EXPECT_EQ(balance_sequences(empty).imbalance, 1.0);
    const BalanceArgs none{.num_ranks = 2, .policy = policy};
    expect_sound(none, balance_sequences(none));
  }
}

TEST(BalanceSequences, RefusesWhatHasNoCost) {
  const Lengths lengths = {3, -1};
  const auto refusal = [](const BalanceArgs& args) {
    return message_of([&] { static_cast<void>(balance_sequences(args)); });
  };
  EXPECT_EQ(refusal({.lengths = lengths}), "lengths[1] must not be negative, got -1");
  EXPECT_EQ(refusal({.num_ranks = 0}), "num_ranks must be in [1, 65536], got 0");
  EXPECT_EQ(refusal({.cost_per_token = -1.0}),
            "cost_per_token and cost_per_token_pair must be finite and not negative, got -1 and 0");
}

TEST(BalanceSequences, RefusesSizesThatCannotBe) {
  const auto refusal = [](const BalanceArgs& args) {
    return message_of([&] { static_cast<void>(balance_sequences(args)); });
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const Lengths two_huge = {kHuge / 2 + 1, kHuge / 2 + 1};
  const Lengths almost = {int64_t{1} << 60, 0, 1};
  for (const auto policy : {BalancePolicy::kLongestFirst, BalancePolicy::kKeepOrder}) {
    EXPECT_EQ(refusal({.lengths = two_huge, .policy = policy}),
              "the lengths must sum to at most 2^60 tokens, got more with lengths[0] "
              "(4611686018427387904)");
    EXPECT_EQ(refusal({.lengths = almost, .policy = policy}),
              "the lengths must sum to at most 2^60 tokens, got more with lengths[2] (1)");
    EXPECT_EQ(refusal({.lengths = std::span(almost).first(2), .policy = policy}),
              "nothing was thrown");
    EXPECT_EQ(refusal({.num_ranks = 100'000'000, .policy = policy}),
              "num_ranks must be in [1, 65536], got 100000000");
  }
}

}  // namespace
}  // namespace crossdock
