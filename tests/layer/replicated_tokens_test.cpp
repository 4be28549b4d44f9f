// Tokens that several ranks hold: sliced by the layer with replicated_over, otherwise refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>

#include "layer/layer_cases.hpp"
#include "layer/replicated_case.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 4;

// Slices as the layer makes them of 5 tokens on ranks 0 and 1, and of 1 token on ranks 2 and 3.
LayerCase sliced_case(size_t number = 2) {
  LayerCaseOptions options = list_layer_cases(kRanks)[number].options;
  options.tokens_per_rank = {3, 2, 1, 0};
  return make_case(options);
}

TEST(ReplicatedTokens, HaveTheBitsOfTokensThatAreSliced) {
  for (const size_t number : {0UL, 1UL, 2UL, 3UL}) {
    LayerCase sliced = sliced_case(number);
    sliced.config.router.jitter = 0.0;
    const std::vector<RankResult> reference = run_reference(sliced);
    for (const std::string& strategy : strategy_names()) {
      sliced.config.strategy = strategy;
      const std::vector<RankResult> slices = run_layer_on_threads(sliced);
      const LayerCase replicated = replicated_case(sliced);
      run_ranks(kRanks, [&](Group& group) {
        const std::unique_ptr<Group> pair = pair_of(group);
        const RankResult got = run_layer(group, replicated, {.replicated_over = pair.get()});
        const RankResult exact = gathered(slices, group.rank());
        EXPECT_EQ(find_difference(got, exact, 0.0), "") << strategy << ", case " << number;
        EXPECT_EQ(find_difference(got, gathered(reference, group.rank()), 1e-11), "");
      });
    }
  }
}

TEST(ReplicatedTokens, MayBeThoseOfTheWholeGroupAndOfShardedExperts) {
  LayerCase sliced = sliced_case();
  sliced.tokens_per_rank = {2, 2, 2, 0};
  sliced.config.etp = 2;
  const std::vector<RankResult> wanted = run_reference(sliced);
  LayerCase replicated = spread(sliced, {6, 0, 0, 0});
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, replicated, {.replicated_over = &group}, 0.0, 0);
    MoeForwardResult forward = rank.forward();
    const OwnedTensor grad_x = rank.backward(forward.saved);
    RankResult got = rank.result(forward, grad_x);
    RankResult want = wanted[static_cast<size_t>(group.rank())];
    want.out.clear();
    want.grad_x.clear();
    for (const RankResult& slice : wanted) {
      want.out.insert(want.out.end(), slice.out.begin(), slice.out.end());
      want.grad_x.insert(want.grad_x.end(), slice.grad_x.begin(), slice.grad_x.end());
    }
    EXPECT_EQ(find_difference(got, want, 1e-11), "") << "rank " << group.rank();
  });
}

// The caller's outputs, delayed gradients of the weights, jitter by the ids of all tokens.
TEST(ReplicatedTokens, WorkWithAllArguments) {
  LayerCase sliced = sliced_case();
  sliced.config.router.jitter = 0.1;
  const LayerCase replicated = replicated_case(sliced);
  const int64_t D = sliced.config.router.width;
  std::vector<std::vector<double>> outs(kRanks);
  std::vector<std::vector<double>> grads(kRanks);
  for (const bool is_sliced : {true, false}) {
    run_ranks(kRanks, [&](Group& group) {
      const std::unique_ptr<Group> pair = pair_of(group);
      LayerOnRank rank(group, is_sliced ? sliced : replicated,
                       {.replicated_over = is_sliced ? nullptr : pair.get()});
      const int64_t T = rank.tokens.x.view.num_rows();
      std::vector<int64_t> ids;
      for (int64_t t = 0; t < T; ++t) ids.push_back(t + (group.rank() % 2 == 1 ? 3 : 0));
      std::vector<double> out(static_cast<size_t>(T * D));
      std::vector<double> grad_x(out.size());
      MoeForwardArgs args = rank.forward_args();
      args.jitter_seed = 7;
      args.out = TensorView(out.data(), {T, D});
      if (is_sliced) args.token_ids = ConstTensorView(ids.data(), {T});
      MoeForwardResult forward = rank.layer.forward(args);
      EXPECT_EQ(forward.out.view.data, out.data());
      MoeBackwardArgs back = rank.backward_args(forward.saved);
      back.delay_dw = true;
      back.grad_x = TensorView(grad_x.data(), {T, D});
      rank.layer.backward(back);
      rank.layer.backward_dw({.x = back.x,
                              .grad_out = back.grad_out,
                              .saved = &forward.saved,
                              .experts = back.grads.experts,
                              .shared = back.grads.shared});
      const auto r = static_cast<size_t>(group.rank());
      RankResult result;
      rank.parameters.read_gradients(replicated, result);
      std::vector<double> all = result.grad_gate;
      for (const reference::MlpWeights& expert : result.experts) {
        all.insert(all.end(), expert.w1.begin(), expert.w1.end());
        all.insert(all.end(), expert.b2.begin(), expert.b2.end());
      }
      all.insert(all.end(), result.shared.w2.begin(), result.shared.w2.end());
      if (is_sliced) {
        outs[r] = out;
        grads[r] = all;
        return;
      }
      std::vector<double> wanted = outs[r / 2 * 2];
      wanted.insert(wanted.end(), outs[r / 2 * 2 + 1].begin(), outs[r / 2 * 2 + 1].end());
      EXPECT_EQ(out, wanted);
      EXPECT_EQ(all, grads[r]);
    });
  }
}

// The first pair has two sequences, the second one, as if two single ranks held them. A layer whose
// group has one rank of each pair has half of every sequence.
TEST(ReplicatedTokens, CountEachSequenceOnce) {
  LayerCase layer_case = sliced_case(0);
  layer_case.config.router.aux_loss_coeff = 0.7;
  layer_case.config.router.aux_loss_scope = BalanceScope::kSequence;
  const std::vector<int32_t> ids[] = {{0, 0, 1, 1, 1}, {0}};
  double wanted = 0.0;
  double got = 0.0;
  std::mutex mutex;
  double got_of_halves = 0.0;
  const auto add_loss = [&](LayerOnRank& rank, const std::vector<int32_t>& sequence_ids,
                            double total_sequences, double& sum) {
    MoeForwardArgs args = rank.forward_args();
    args.sequence_ids = ConstTensorView(sequence_ids.data(), {std::ssize(sequence_ids)});
    args.num_sequences = 2;
    const MoeDecision decision = rank.layer.forward(args).saved.decision;
    EXPECT_EQ(decision.total_sequences, total_sequences);
    const std::lock_guard lock(mutex);
    sum += decision.losses.aux;
  };
  const LayerCase alone = spread(layer_case, {5, 1});
  run_ranks(2, [&](Group& group) {
    LayerOnRank rank(group, alone);
    add_loss(rank, ids[group.rank()], 3.0, wanted);
  });
  const LayerCase replicated = replicated_case(layer_case);
  run_ranks(kRanks, [&](Group& group) {
    const std::unique_ptr<Group> pair = pair_of(group);
    LayerOnRank rank(group, replicated, {.replicated_over = pair.get()});
    add_loss(rank, ids[group.rank() / 2], 3.0, got);
  });
  run_ranks(kRanks, [&](Group& world) {
    const std::unique_ptr<Group> pair = pair_of(world);
    const int first = world.rank() % 2;
    const std::unique_ptr<Group> group = world.subgroup(std::vector<int>{first, first + 2});
    LayerOnRank rank(*group, alone, {.replicated_over = pair.get()});
    add_loss(rank, ids[group->rank()], 1.5, got_of_halves);
  });
  EXPECT_GT(wanted, 0.0);
  EXPECT_NEAR(got, wanted, 1e-13);
  EXPECT_NEAR(got_of_halves, 2 * wanted, 1e-13);  // the losses of two groups
}

TEST(ReplicatedTokens, MustBeIdentical) {
  const LayerCase replicated = replicated_case(sliced_case());
  run_ranks(kRanks, [&](Group& group) {
    const std::unique_ptr<Group> pair = pair_of(group);
    LayerOnRank rank(group, replicated, {.replicated_over = pair.get()});
    MoeForwardResult forward = rank.forward();
    const OwnedTensor& grad_out = rank.tokens.grad_out;
    double& value = static_cast<double*>(grad_out.view.data)[0];
    const double before = value;
    if (group.rank() == 1) value += 1.0;
    expect_refused(group, "tokens and gradients must be identical on the ranks of replicated_over",
                   [&] { rank.backward(forward.saved); });
    value = before;
    rank.backward(forward.saved);

    MoeForwardArgs args = rank.forward_args();
    if (group.rank() == 3) args.x.shape = {0, args.x.shape[1]};
    if (group.rank() == 3) args.mask.shape = {0};
    expect_refused(group, "rank 1 of that group has 0 of them and rank 0 1",
                   [&] { (void)rank.layer.forward(args); });
    EXPECT_FALSE(pair->is_poisoned());
    (void)rank.forward();
  });
}

// Pairs that hold the same tokens belong to different groups of experts: {0, 1} and {2, 3} exchange
// rows, {0, 2} and {1, 3} hold the same tokens.
TEST(ReplicatedTokens, MayBelongToSeveralGroupsOfExperts) {
  LayerCase sliced = make_case(list_layer_cases(2)[0].options);
  sliced.tokens_per_rank = {3, 2};
  const ThreadOptions options{.group = {.arrival_deadline = std::chrono::seconds(20)}};
  run_ranks(
      kRanks,
      [&](Group& world) {
        const int first = world.rank() / 2 * 2;
        const int column = world.rank() % 2;
        const std::unique_ptr<Group> experts = world.subgroup(std::vector<int>{first, first + 1});
        const std::unique_ptr<Group> pair = world.subgroup(std::vector<int>{column, column + 2});
        // Ranks 0 and 2 hold tokens 0 to 4, ranks 1 and 3 tokens 5 to 9.
        const LayerCase tokens = spread(sliced, {5, 5});
        LayerOnRank rank(*experts, tokens, {.replicated_over = pair.get()}, 0.0, column);
        const MoeForwardResult forward = rank.forward();
        EXPECT_EQ(forward.out.view.num_rows(), 5);
        EXPECT_EQ(forward.saved.decision.total_tokens, first == 0 ? 6 : 4);

        // A refusal by one rank of one group of experts reaches all ranks.
        MoeForwardArgs args = rank.forward_args();
        if (world.rank() == 0) args.weights.experts.w2 = {};
        EXPECT_THAT(message_of([&] { (void)rank.layer.forward(args); }), HasSubstr("w2 must be"))
            << "rank " << world.rank();
        EXPECT_EQ(reference::to_values(rank.forward().out), reference::to_values(forward.out));
      },
      options);
}

// Tokens of rank 0 on all ranks.
LayerCase equal_case(int64_t num_tokens = 8) {
  LayerCaseOptions options = list_layer_cases(3)[0].options;
  options.tokens_per_rank.assign(3, num_tokens);
  LayerCase layer_case = make_case(options);
  const int64_t size = layer_case.config.router.width * layer_case.tokens_per_rank[0];
  for (int64_t i = size; i < std::ssize(layer_case.x); ++i) {
    layer_case.x[static_cast<size_t>(i)] = layer_case.x[static_cast<size_t>(i % size)];
  }
  return layer_case;
}

TEST(EqualTokens, AreRefusedUnlessTheyAreAllowed) {
  LayerCase equal = equal_case();
  LayerCase allowed = equal;
  allowed.config.allow_equal_tokens = true;
  const std::vector<RankResult> wanted = run_reference(allowed);
  run_ranks(3, [&](Group& group) {
    expect_refused(group, "those of ranks 0 and 1 are bit-identical",
                   [&] { run_layer(group, equal); });
    EXPECT_EQ(find_difference(run_layer(group, allowed), wanted[static_cast<size_t>(group.rank())],
                              1e-11),
              "");
  });
}

TEST(EqualTokens, AreAcceptedIfTheyAreFew) {
  const LayerCase few = equal_case(7);
  const std::vector<RankResult> wanted = run_reference(few);
  const std::vector<RankResult> got = run_layer_on_threads(few);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(find_difference(got[rank], wanted[rank], 1e-11), "");
  }
}

// The mistake that the refusal prevents: replicated tokens that every rank dispatches.
TEST(EqualTokens, WouldCountSeveralTimes) {
  LayerCase equal = equal_case();
  equal.config.allow_equal_tokens = true;
  for (size_t i = 0; i < equal.grad_out.size(); ++i) {
    equal.grad_out[i] = equal.grad_out[i % (equal.grad_out.size() / 3)];
  }
  const auto sum_of_w1 = [](const std::vector<RankResult>& ranks) {
    std::vector<double> sums(ranks[0].experts.size(), 0.0);
    for (const RankResult& rank : ranks) {
      for (size_t e = 0; e < sums.size(); ++e) {
        for (const double value : rank.experts[e].w1) sums[e] += value;
      }
    }
    return sums;
  };
  std::vector<RankResult> told(3);
  LayerCase checked = equal;
  checked.config.allow_equal_tokens = false;
  run_ranks(3, [&](Group& group) {
    told[static_cast<size_t>(group.rank())] =
        run_layer(group, checked, {.replicated_over = &group});
  });
  const std::vector<double> once = sum_of_w1(told);
  const std::vector<double> thrice = sum_of_w1(run_layer_on_threads(equal));
  for (size_t e = 0; e < once.size(); ++e) EXPECT_NEAR(thrice[e], 3 * once[e], 1e-11);
}

TEST(EqualTokens, AreFoundAmongAllRanksThatCountTogether) {
  const LayerCase layer_case = spread(equal_case(), {8});
  run_ranks(2, [&](Group& world) {
    const std::unique_ptr<Group> alone = world.subgroup(std::vector<int>{world.rank()});
    LayerOnRank rank(*alone, layer_case, {.counting_group = &world});
    EXPECT_THAT(message_of([&] { (void)rank.forward(); }), HasSubstr("are bit-identical"));
    EXPECT_FALSE(world.is_poisoned());
  });
}

// 41 tokens that differ in one value, which is not in the sample of 16 tokens.
TEST(EqualTokens, AreNotConfusedWithAlmostEqualOnes) {
  LayerCaseOptions options = list_layer_cases(2)[0].options;
  options.tokens_per_rank = {41, 41};
  LayerCase layer_case = make_case(options);
  const size_t half = layer_case.x.size() / 2;
  for (size_t i = 0; i < half; ++i) layer_case.x[half + i] = layer_case.x[i];
  layer_case.x[half + 8] += 1.0;  // of token 1
  const std::vector<RankResult> wanted = run_reference(layer_case);
  const std::vector<RankResult> got = run_layer_on_threads(layer_case);
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(find_difference(got[rank], wanted[rank], 1e-11), "");
  }
}

TEST(EqualTokens, OfPaddingAreNoTokens) {
  LayerCase layer_case = equal_case();
  layer_case.mask.assign(layer_case.x.size() / 8, 1);
  std::fill_n(layer_case.mask.begin(), layer_case.tokens_per_rank[0], uint8_t{0});
  const std::vector<RankResult> wanted = run_reference(layer_case);
  const std::vector<RankResult> got = run_layer_on_threads(layer_case);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(find_difference(got[rank], wanted[rank], 1e-11), "");
  }
}

}  // namespace
}  // namespace crossdock
