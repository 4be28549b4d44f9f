// The ranks and sequences over which the losses are counted, and the options of the router.
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

constexpr int kRanks = 4;

LayerCase case_with_losses(BalanceScope scope) {
  LayerCaseOptions options = list_layer_cases(kRanks)[0].options;
  options.config.router.aux_loss_coeff = 0.7;
  options.config.router.z_loss_coeff = 0.3;
  options.config.router.aux_loss_scope = scope;
  options.tokens_per_rank = {6, 3, 0, 9};
  return make_case(options);
}

TEST(MoeLayerLosses, EverySequenceIsBalancedForItself) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kSequence);
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    reference::RouterInput input = router_input(layer_case, group.rank());
    input.num_sequences = 3;  // the last one has no token
    for (int64_t t = 0; t < input.T; ++t) input.sequence_ids.push_back(t < 2 ? 0 : 1);
    const OwnedTensor ids = reference::to_tensor(
        DType::kI32, {input.T}, {input.sequence_ids.begin(), input.sequence_ids.end()});
    MoeForwardArgs args = rank.forward_args();
    args.sequence_ids = ids.view;
    args.num_sequences = 3;
    const MoeDecision decision = rank.layer.forward(args).saved.decision;

    const reference::RouterResult routes = reference::route(input);
    reference::RouterCounts counts = routes.counts;
    counts.total_sequences = 6;  // two on each of three ranks
    counts.total_tokens = 18;
    const reference::RouterLossValues wanted = reference::router_losses(input, routes, counts);
    EXPECT_NEAR(decision.losses.aux, wanted.aux, 1e-12);
    EXPECT_NEAR(decision.losses.z, wanted.z, 1e-12);
    EXPECT_EQ(decision.total_sequences, 6);
    EXPECT_EQ(decision.total_tokens, 18);
  });
}

TEST(MoeLayerLosses, RoutesAreCountedOverTheGroupThatIsStated) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kBatch);
  run_ranks(kRanks, [&](Group& group) {
    const int first = group.rank() / 2 * 2;
    const std::vector<int> pair = {first, first + 1};
    const std::unique_ptr<Group> counting = group.subgroup(pair);
    LayerOnRank rank(group, layer_case, {.counting_group = counting.get()});
    const MoeDecision decision = rank.forward().saved.decision;

    reference::RouterCounts counts = reference::route(router_input(layer_case, pair[0])).counts;
    const reference::RouterCounts other =
        reference::route(router_input(layer_case, pair[1])).counts;
    for (size_t e = 0; e < counts.routes_per_expert.size(); ++e) {
      counts.routes_per_expert[e] += other.routes_per_expert[e];
    }
    counts.num_tokens[0] += other.num_tokens[0];  // the z-loss is also a mean over them
    const reference::RouterInput input = router_input(layer_case, group.rank());
    const reference::RouterLossValues wanted =
        reference::router_losses(input, reference::route(input), counts);
    EXPECT_NEAR(decision.losses.aux, wanted.aux, 1e-12);
    EXPECT_NEAR(decision.losses.z, wanted.z, 1e-12);
  });
}

TEST(MoeLayerLosses, TheCallerMayStateHowManySequencesThereAre) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kSequence);
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    MoeForwardArgs args = rank.forward_args();
    const MoeDecision counted = rank.layer.forward(args).saved.decision;
    EXPECT_EQ(counted.total_sequences, 3);  // one rank has no token
    args.total_sequences = 6;               // they continue on ranks of other groups
    const MoeDecision stated = rank.layer.forward(args).saved.decision;
    EXPECT_EQ(stated.total_sequences, 6);
    EXPECT_NEAR(2 * stated.losses.aux, counted.losses.aux, 1e-15);
  });
}

// Expert groups of 2, and losses counted over all 4 ranks.
TEST(MoeLayerLosses, OfSeveralGroupsThatAreCountedTogetherSumToTheWhole) {
  LayerCase layer_case = case_with_losses(BalanceScope::kBatch);
  double aux[kRanks] = {};
  double z[kRanks] = {};
  run_ranks(kRanks, [&](Group& world) {
    const int first = world.rank() / 2 * 2;
    const std::unique_ptr<Group> group = world.subgroup(std::vector<int>{first, first + 1});
    LayerOnRank rank(*group, layer_case, {.counting_group = &world}, 0.0, world.rank());
    const MoeDecision decision = rank.forward().saved.decision;
    EXPECT_EQ(decision.total_tokens, 18);
    aux[world.rank()] = decision.losses.aux;
    z[world.rank()] = decision.losses.z;
  });
  const LayerCase one = spread(layer_case, {18});
  const reference::RouterInput input = router_input(one, 0);
  const reference::RouterResult routes = reference::route(input);
  const reference::RouterLossValues wanted = reference::router_losses(input, routes, routes.counts);
  EXPECT_NEAR(std::accumulate(aux, aux + kRanks, 0.0), wanted.aux, 1e-12);
  EXPECT_NEAR(std::accumulate(z, z + kRanks, 0.0), wanted.z, 1e-12);
}

// Every rank holds a part of each of 3 sequences, of which the last has no token.
TEST(MoeLayerLosses, SequencesThatRanksShareAreCountedOnce) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kSequence);
  for (const bool over_pairs : {false, true}) {
    double aux[kRanks] = {};
    run_ranks(kRanks, [&](Group& group) {
      const int first = group.rank() / 2 * 2;
      const std::unique_ptr<Group> pair = group.subgroup(std::vector<int>{first, first + 1});
      LayerOnRank rank(group, layer_case, {.counting_group = over_pairs ? pair.get() : &group});
      const int64_t T = rank.tokens.x.view.num_rows();
      std::vector<int32_t> ids;
      for (int64_t t = 0; t < T; ++t) ids.push_back(t % 2 == 0 ? 0 : 1);
      MoeForwardArgs args = rank.forward_args();
      args.sequence_ids = ConstTensorView(ids.data(), {T});
      args.num_sequences = 3;
      const MoeDecision decision = rank.layer.forward(args).saved.decision;
      EXPECT_EQ(decision.total_sequences, 2);
      aux[group.rank()] = decision.losses.aux;
    });
    const auto wanted = [&](std::vector<int> ranks) {
      reference::RouterInput input = router_input(layer_case, ranks[0]);
      input.T = 0;
      input.x.clear();
      input.num_sequences = 3;
      for (const int rank : ranks) {
        const reference::RouterInput part = router_input(layer_case, rank);
        input.T += part.T;
        input.x.insert(input.x.end(), part.x.begin(), part.x.end());
        for (int64_t t = 0; t < part.T; ++t) input.sequence_ids.push_back(t % 2 == 0 ? 0 : 1);
      }
      const reference::RouterResult routes = reference::route(input);
      return reference::router_losses(input, routes, routes.counts).aux;
    };
    if (over_pairs) {
      EXPECT_NEAR(aux[0] + aux[1], wanted({0, 1}), 1e-12);
      EXPECT_NEAR(aux[2] + aux[3], wanted({2, 3}), 1e-12);
    } else {
      EXPECT_NEAR(aux[0] + aux[1] + aux[2] + aux[3], wanted({0, 1, 2, 3}), 1e-12);
    }
  }
}

TEST(MoeLayerLosses, RanksThatShareSequencesMustHaveTheSameNumberOfThem) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kSequence);
  for (const bool over_pairs : {false, true}) {
    run_ranks(
        kRanks,
        [&](Group& group) {
          const int first = group.rank() / 2 * 2;
          const std::unique_ptr<Group> pair = group.subgroup(std::vector<int>{first, first + 1});
          LayerOnRank rank(group, layer_case, {.counting_group = over_pairs ? pair.get() : &group});
          const std::vector<int32_t> ids(static_cast<size_t>(rank.tokens.x.view.num_rows()), 0);
          MoeForwardArgs args = rank.forward_args();
          args.sequence_ids = ConstTensorView(ids.data(), {rank.tokens.x.view.num_rows()});
          args.num_sequences = group.rank() == 1 ? 3 : 2;
          expect_refused(group, "rank 1 has num_sequences=3 where rank 0 has num_sequences=2",
                         [&] { (void)rank.layer.forward(args); });
          args.num_sequences = 2;
          (void)rank.layer.forward(args);
        },
        {.group = {.arrival_deadline = std::chrono::seconds(60)}});
  }
}

TEST(MoeLayerLosses, AnInputThatOneGroupRefusesReleasesThoseThatAreCountedWithIt) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kBatch);
  run_ranks(
      kRanks,
      [&](Group& world) {
        const int first = world.rank() / 2 * 2;
        const std::unique_ptr<Group> group = world.subgroup(std::vector<int>{first, first + 1});
        LayerOnRank rank(*group, layer_case, {.counting_group = &world}, 0.0, world.rank());
        MoeForwardArgs args = rank.forward_args();
        if (world.rank() == 1) args.weights.gate.weight = {};
        expect_refused(*group, "the gate must be", [&] { (void)rank.layer.forward(args); });
        (void)rank.forward();
      },
      {.group = {.arrival_deadline = std::chrono::seconds(60)}});
}

TEST(MoeLayerLosses, TheirGradientsMayBeScaled) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kBatch);
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    const auto grad_gate = [&](double grad_losses) {
      MoeForwardResult result = rank.forward();
      MoeBackwardArgs args = rank.backward_args(result.saved);
      args.grad_losses = grad_losses;
      rank.layer.backward(args);
      return reference::to_values(rank.parameters.grads().gate);
    };
    const std::vector<double> none = grad_gate(0.0);
    const std::vector<double> one = grad_gate(1.0);
    const std::vector<double> three = grad_gate(3.0);
    for (size_t i = 0; i < none.size(); ++i) {
      ASSERT_NEAR(three[i] - none[i], 3 * (one[i] - none[i]), 1e-12);
    }
    const int64_t T = rank.tokens.x.view.num_rows();
    EXPECT_EQ(one == none, T == 0) << "rank " << group.rank();
  });
}

TEST(MoeLayerLosses, JitterBelongsToTheSeedAndTheTokens) {
  LayerCase layer_case = case_with_losses(BalanceScope::kBatch);
  layer_case.config.router.jitter = 0.5;
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    const int64_t T = rank.tokens.x.view.num_rows();
    const auto losses = [&](uint64_t seed, int64_t first_token) {
      std::vector<int64_t> ids(static_cast<size_t>(T));
      std::iota(ids.begin(), ids.end(), first_token);
      MoeForwardArgs args = rank.forward_args();
      args.jitter_seed = seed;
      args.token_ids = ConstTensorView(ids.data(), {T});
      return rank.layer.forward(args).saved.decision.losses.z;
    };
    const double z = losses(1, 0);
    EXPECT_EQ(losses(1, 0), z);
    EXPECT_EQ(losses(2, 0) == z, T == 0);
    EXPECT_EQ(losses(1, 100) == z, T == 0);
  });
}

TEST(MoeLayerLosses, LoadIsThatOfAllRanksBeforeDrops) {
  LayerCase layer_case = case_with_losses(BalanceScope::kBatch);
  layer_case.config.dispatch.capacity = Capacity{.factor = 0.2};
  run_ranks(kRanks, [&](Group& group) {
    const RankResult result = run_layer(group, layer_case);
    int64_t sum = 0;
    for (const int64_t routes : result.load) sum += routes;
    EXPECT_EQ(sum, 18 * layer_case.config.router.top_k);
  });
}

TEST(MoeLayerLosses, RoutesOfAnEarlierStepAreReplayed) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kBatch);
  run_ranks(kRanks, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    const MoeForwardResult first = rank.forward();
    MoeForwardArgs args = rank.forward_args();
    args.forced_ids = first.saved.decision.router->routing().expert_ids;
    const MoeForwardResult again = rank.layer.forward(args);
    EXPECT_EQ(reference::to_values(again.out.view), reference::to_values(first.out.view));
  });
}

}  // namespace
}  // namespace crossdock
