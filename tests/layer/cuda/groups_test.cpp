// Layers on GPUs that count over other groups than their own, or whose tokens are replicated:
// results of the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/attachment.hpp"
#include "layer/cuda/layer_on_gpu.hpp"
#include "layer/replicated_case.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

constexpr int kRanks = 4;
constexpr double kTolerance = 2e-5;

class CudaLayerGroups : public CudaTest {};

/// The groups of one rank.
struct RankGroups {
  std::unique_ptr<Group> own;    // the layer's; null: the world
  std::unique_ptr<Group> other;  // null: the world
  std::function<MoeLayerOptions(Group&)> options_of;

  Group& layer(Group& world) const { return own ? *own : world; }
  MoeLayerOptions options(Group& world) const { return options_of(other ? *other : world); }
};
using MakeGroups = std::function<RankGroups(Group&)>;

LayerCase case_with_losses(BalanceScope scope, std::vector<int64_t> tokens_per_rank) {
  LayerCase layer_case = medium_case(DType::kF32);
  layer_case.config.router.aux_loss_coeff = 0.7;
  layer_case.config.router.z_loss_coeff = 0.3;
  layer_case.config.router.aux_loss_scope = scope;
  return spread(layer_case, std::move(tokens_per_rank));
}

/// Runs a layer on the CPU and on the GPU, with tokens of the world's ranks.
void expect_results_of_the_cpu(const LayerCase& layer_case, const MakeGroups& make_groups,
                               const std::vector<int>& sequence_of_token = {},
                               int64_t num_sequences = 3) {
  std::vector<RankResult> wanted(kRanks);
  std::vector<double> sequences(kRanks);
  const auto run = [&](auto& rank, ConstTensorView ids, const auto& finish) {
    MoeForwardArgs args = rank.forward_args();
    if (ids.given()) {
      args.sequence_ids = ids;
      args.num_sequences = num_sequences;  // some have no token
    }
    MoeForwardResult forward = rank.layer.forward(args);
    const OwnedTensor grad_x = rank.backward(forward.saved);
    finish(forward, grad_x);
  };
  const auto ids_of = [&](const LayerOnRank& rank) {
    const int64_t T = rank.tokens.x.view.num_rows();
    std::vector<double> ids;
    for (int64_t t = 0; t < T && !sequence_of_token.empty(); ++t) {
      ids.push_back(sequence_of_token[static_cast<size_t>(t) % sequence_of_token.size()]);
    }
    return sequence_of_token.empty() ? OwnedTensor() : reference::to_tensor(DType::kI32, {T}, ids);
  };
  run_ranks(kRanks, [&](Group& world) {
    const auto r = static_cast<size_t>(world.rank());
    const RankGroups groups = make_groups(world);
    LayerOnRank rank(groups.layer(world), layer_case, groups.options(world), 0.0, world.rank());
    const OwnedTensor ids = ids_of(rank);
    run(rank, ids.view, [&](const MoeForwardResult& forward, const OwnedTensor& grad_x) {
      wanted[r] = rank.result(forward, grad_x);
      sequences[r] = forward.saved.decision.total_sequences;
    });
  });
  run_ranks(kRanks, [&](Group& world) {
    const auto r = static_cast<size_t>(world.rank());
    const RankGroups groups = make_groups(world);
    LayerOnGpu gpu(groups.layer(world), layer_case, 0.0, groups.options(world), world.rank());
    const OwnedTensor host_ids = ids_of(gpu.rank);
    const OwnedTensor ids = host_ids.view.given()
                                ? to_device(ConstTensorView(host_ids.view), gpu.stream)
                                : OwnedTensor();
    for (int step = 0; step < 2; ++step) {
      run(gpu.rank, ids.view, [&](const MoeForwardResult& forward, const OwnedTensor& grad_x) {
        EXPECT_EQ(find_difference(gpu.result(forward, grad_x), wanted[r], kTolerance), "")
            << "rank " << r << ", step " << step;
        const MoeDecision decision = forward.saved.decision.on_host(gpu.stream.view());
        EXPECT_EQ(decision.total_sequences, sequences[r]);
      });
    }
  });
}

TEST_F(CudaLayerGroups, RoutesAreCountedOverPairsOfTheGroup) {
  for (const BalanceScope scope : {BalanceScope::kBatch, BalanceScope::kGlobalBatch}) {
    expect_results_of_the_cpu(
        case_with_losses(scope, {60, 40, 0, 111}), [](Group& world) -> RankGroups {
          return {.own = nullptr, .other = pair_of(world), .options_of = [](Group& pair) {
                    return MoeLayerOptions{.counting_group = &pair};
                  }};
        });
  }
}

TEST_F(CudaLayerGroups, RoutesAreCountedOverSeveralGroupsOfExperts) {
  expect_results_of_the_cpu(
      case_with_losses(BalanceScope::kBatch, {60, 40, 0, 111}), [](Group& world) -> RankGroups {
        return {.own = pair_of(world), .other = nullptr, .options_of = [](Group& all) {
                  return MoeLayerOptions{.counting_group = &all};
                }};
      });
}

TEST_F(CudaLayerGroups, SequencesAreSharedByPairsOrByAllRanks) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kSequence, {60, 40, 0, 111});
  for (const bool over_pairs : {true, false}) {
    expect_results_of_the_cpu(layer_case,
                              [&](Group& world) -> RankGroups {
                                return {.own = nullptr,
                                        .other = over_pairs ? pair_of(world) : nullptr,
                                        .options_of = [](Group& shared) {
                                          return MoeLayerOptions{.sequence_group = &shared};
                                        }};
                              },
                              {0, 1, 1});
  }
}

TEST_F(CudaLayerGroups, CountsOfManySequencesTakeSeveralExchanges) {
  expect_results_of_the_cpu(
      case_with_losses(BalanceScope::kSequence, {60, 40, 0, 111}),
      [](Group& world) -> RankGroups {
        return {.own = nullptr, .other = pair_of(world), .options_of = [](Group& pair) {
                  return MoeLayerOptions{.sequence_group = &pair};
                }};
      },
      {0, 1, 157, 399}, 400);
}

TEST_F(CudaLayerGroups, SeveralLossesCountOverGroupsOfTheirOwn) {
  LayerCase layer_case = case_with_losses(BalanceScope::kBatch, {60, 40, 0, 111});
  layer_case.config.router.aux_loss_coeff = 0.0;
  layer_case.config.router.aux_loss_coeffs = {.batch = 0.2, .sequence = 0.4, .global_batch = 0.1};
  expect_results_of_the_cpu(
      layer_case,
      [](Group& world) -> RankGroups {
        Group* all = &world;
        return {.own = pair_of(world), .other = pair_of(world), .options_of = [all](Group& pair) {
                  return MoeLayerOptions{.counting_group = all, .sequence_group = &pair};
                }};
      },
      {0, 1});
}

RankGroups replicated_pairs(Group& world) {
  return {.own = nullptr, .other = pair_of(world), .options_of = [](Group& pair) {
            return MoeLayerOptions{.replicated_over = &pair};
          }};
}

TEST_F(CudaLayerGroups, TokensAreReplicatedOverPairs) {
  const LayerCase sliced = case_with_losses(BalanceScope::kBatch, {50, 49, 1, 0});
  expect_results_of_the_cpu(replicated_case(sliced), replicated_pairs);
}

TEST_F(CudaLayerGroups, ReplicatedTokensHaveTheBitsOfTokensThatAreSliced) {
  LayerCase sliced = spread(medium_case(DType::kBF16), {50, 49, 1, 0});
  const std::vector<RankResult> slices = run_layer_on_gpu(sliced);
  const LayerCase replicated = replicated_case(sliced);
  run_ranks(kRanks, [&](Group& world) {
    const std::unique_ptr<Group> pair = pair_of(world);
    LayerOnGpu gpu(world, replicated, kPoison, {.replicated_over = pair.get()});
    const RankResult got = gpu.run();
    const RankResult wanted = gathered(slices, world.rank());
    EXPECT_EQ(find_difference(got, wanted, 0.0), "") << "rank " << world.rank();
  });
}

// Outputs of the caller, and another number of tokens in every step.
TEST_F(CudaLayerGroups, ReplicatedTokensMayBecomeMore) {
  LayerCase all = spread(medium_case(DType::kBF16), {100});
  all.config.router.aux_loss_coeff = 0.0;  // a token's results do not depend on the others
  const int64_t D = all.config.router.width;
  const RankResult wanted = run_layer_on_gpu(all)[0];
  const auto first = [&](const std::vector<double>& values, int64_t T) {
    return std::vector<double>(values.begin(), values.begin() + T * D);
  };
  run_ranks(2, [&](Group& world) {
    LayerOnGpu gpu(world, all, 0.0, {.replicated_over = &world}, 0);
    for (const int64_t T : {3, 100, 0, 57}) {
      const OwnedTensor out = device_tensor(DType::kBF16, {T, D}, gpu.stream);
      MoeForwardArgs args = gpu.rank.forward_args();
      args.x.shape = {T, D};
      args.mask.shape = {T};
      args.out = out.view;
      MoeForwardResult forward = gpu.rank.layer.forward(args);
      EXPECT_EQ(forward.out.view.data, out.view.data);
      EXPECT_EQ(values_of(out.view, gpu.stream), first(wanted.out, T)) << T << " tokens";
      MoeBackwardArgs back = gpu.rank.backward_args(forward.saved);
      back.x.shape = back.grad_out.shape = {T, D};
      const OwnedTensor grad_x = gpu.rank.layer.backward(back);
      EXPECT_EQ(values_of(grad_x.view, gpu.stream), first(wanted.grad_x, T)) << T << " tokens";
    }
  });
}

TEST_F(CudaLayerGroups, ReplicatedTokensMustBeIdentical) {
  const LayerCase layer_case = spread(medium_case(DType::kBF16), {20, 20});
  run_ranks(2, [&](Group& world) {
    LayerOnGpu gpu(world, layer_case, 0.0, {.replicated_over = &world});
    expect_refused(world, "tokens and gradients must be identical on the ranks of replicated_over",
                   [&] { (void)gpu.rank.forward(); });
    LayerOnGpu same(world, layer_case, 0.0, {.replicated_over = &world}, 0);
    EXPECT_NO_THROW((void)same.run());
  });
}

TEST_F(CudaLayerGroups, RefusalsReachTheRanksOfOtherGroups) {
  const LayerCase layer_case = case_with_losses(BalanceScope::kBatch, {60, 40, 0, 111});
  run_ranks(kRanks,
            [&](Group& world) {
              const std::unique_ptr<Group> group = pair_of(world);
              LayerOnGpu gpu(*group, layer_case, 0.0, {.counting_group = &world}, world.rank());
              for (int step = 0; step < 2; ++step) {
                MoeForwardArgs args = gpu.rank.forward_args();
                if (world.rank() == 1) args.weights.gate.weight = {};
                expect_refused(*group, "the gate must be",
                               [&] { (void)gpu.rank.layer.forward(args); });
                EXPECT_FALSE(world.is_poisoned());
                EXPECT_NO_THROW((void)gpu.run());
              }
            },
            {.group = {.arrival_deadline = std::chrono::seconds(60)}});
}

// Found on the GPU, after the ranks have agreed on the forward: the next call reports it.
TEST_F(CudaLayerGroups, TooManyRowsAreTheSameErrorOnAllRanks) {
  LayerCase layer_case = spread(medium_case(DType::kBF16), {20, 20});
  layer_case.config.dispatch.max_rows = 5;
  for (const bool may_run_ahead : {false, true}) {
    run_ranks(2,
              [&](Group& world) {
                comm::gpu_pretences_of(world).threads_run_ahead = may_run_ahead;
                LayerOnGpu gpu(world, layer_case, 0.0, {.replicated_over = &world}, 0);
                std::string message;
                for (int step = 0; step < 3 && message.empty(); ++step) {
                  message = message_of([&] { (void)gpu.rank.forward(); });
                  gpu.stream.synchronize();
                }
                EXPECT_THAT(message, ::testing::HasSubstr("max_rows")) << "rank " << world.rank();
                EXPECT_FALSE(world.is_poisoned());
              },
              {.group = {.arrival_deadline = std::chrono::seconds(60)}});
  }
}

TEST_F(CudaLayerGroups, BitsDoNotDependOnRunningAhead) {
  const LayerCase layer_case = spread(medium_case(DType::kBF16), {60, 40, 0, 111});
  const auto run = [&](bool may_run_ahead) {
    std::vector<RankResult> results(kRanks);
    run_ranks(kRanks, [&](Group& world) {
      comm::gpu_pretences_of(world).threads_run_ahead = may_run_ahead;
      const std::unique_ptr<Group> pair = pair_of(world);
      LayerOnGpu gpu(world, layer_case, 0.0, {.counting_group = pair.get()});
      for (int step = 0; step < 3; ++step) {
        results[static_cast<size_t>(world.rank())] = gpu.run();
      }
    });
    return shared_bits(results);
  };
  EXPECT_EQ(run(/*may_run_ahead=*/true), run(/*may_run_ahead=*/false));
}

TEST_F(CudaLayerGroups, RefusesWhatOnlyHostsCanCount) {
  run_ranks(2, [&](Group& world) {
    LayerCase layer_case = spread(medium_case(DType::kBF16), {20, 20});
    layer_case.config.router.jitter = 0.1;
    LayerOnGpu jittered(world, layer_case, 0.0, {.replicated_over = &world}, 0);
    expect_refused(world, "pass token_ids", [&] { (void)jittered.rank.forward(); });

    layer_case.config.router.jitter = 0.0;
    layer_case.config.router.aux_loss_scope = BalanceScope::kSequence;
    const std::unique_ptr<Group> alone = world.subgroup(std::vector<int>{world.rank()});
    LayerOnGpu halves(*alone, layer_case, 0.0, {.replicated_over = &world}, 0);
    expect_refused(*alone, "total_sequences", [&] { (void)halves.rank.forward(); });
  });
}

}  // namespace
}  // namespace crossdock
