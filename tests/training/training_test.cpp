// Training runs on meshes of threads, compared with one rank. tests/training/training_cases.hpp
// defines equality; tests/training/blocks is the program under test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <numeric>

#include "crossdock/mesh.hpp"
#include "crossdock/threads.hpp"
#include "support/message_of.hpp"
#include "training/blocks/model.hpp"
#include "training/blocks/parameter.hpp"
#include "training/training_cases.hpp"

namespace crossdock {
namespace {

using train::Layout;
using train::Mistake;
using train::StepReport;
using train::TrainConfig;
using train::TrainResult;

// The results of all ranks.
std::vector<TrainResult> train_on_threads(const TrainConfig& config, int ranks_per_node = 0) {
  const auto ranks = static_cast<int>(resolve_mesh(config.mesh).world);
  std::vector<TrainResult> results(static_cast<size_t>(ranks));
  run_ranks(ranks,
            [&](Group& world) {
              results[static_cast<size_t>(world.rank())] = train::train(world, config);
            },
            {.ranks_per_node = ranks_per_node});
  return results;
}

// Empty if every rank has the results of the run on one rank.
std::string find_difference(const TrainConfig& config, int ranks_per_node = 0) {
  for (const TrainResult& result : train_on_threads(config, ranks_per_node)) {
    const std::string difference = difference_from_one_rank(result, config);
    if (!difference.empty()) return difference;
  }
  return "";
}

TrainConfig config_of(const MeshShape& mesh, int64_t steps = 6) {
  return {.mesh = mesh, .steps = steps};
}

constexpr MeshShape kEveryAxis = {.world = 8, .tp = 2, .cp = 2, .etp = 2, .ep = 2};

// One rank's gradients against differences of its loss, along a direction in which all parameters
// change.
TEST(Training, GradientsAreThoseOfTheLoss) {
  run_ranks(1, [](Group& world) {
    Mesh mesh(world, {.world = 1});
    train::Model<double> model(mesh, {});
    const train::Tokens tokens = train::take_share(mesh, train::make_sequences({}, 0), {});
    const auto num_targets = std::count_if(tokens.targets.begin(), tokens.targets.end(),
                                           [](int32_t target) { return target >= 0; });
    const train::BatchSize batch{.num_targets = num_targets};
    const auto loss = [&] {
      const train::LossShares losses = model.forward(tokens, batch);
      return losses.text + losses.router;
    };
    loss();
    model.backward(tokens);
    constexpr double kStep = 1e-7;  // small: no token changes its experts
    std::vector<std::vector<double>> directions;
    double expected = 0.0;
    for (const train::Parameter<double>* parameter : model.parameters()) {
      directions.push_back(train::random_values<double>("direction of " + parameter->name,
                                                        std::ssize(parameter->value), 1.0));
      expected += std::inner_product(parameter->grad.begin(), parameter->grad.end(),
                                     directions.back().begin(), 0.0);
    }
    const auto move = [&](double factor) {
      for (size_t p = 0; p < directions.size(); ++p) {
        std::vector<double>& value = model.parameters()[p]->value;
        for (size_t i = 0; i < value.size(); ++i) value[i] += factor * directions[p][i];
      }
    };
    move(kStep);
    const double after = loss();
    move(-2.0 * kStep);
    const double before = loss();
    EXPECT_NEAR((after - before) / (2.0 * kStep), expected, 1e-5 * std::abs(expected));
  });
}

TEST(Training, EveryMeshEqualsOneRank) {
  for (const TrainingCase& each : cases_of_four_ranks()) {
    EXPECT_EQ(find_difference(each.config), "") << each.name;
  }
  EXPECT_EQ(find_difference(config_of(kEveryAxis)), "");
  EXPECT_EQ(find_difference(config_of({.world = 3})), "");
  EXPECT_EQ(find_difference(config_of({.world = 7})), "") << "a rank without experts";
}

TEST(Training, EveryStrategyEqualsOneRank) {
  for (const char* strategy : {"allgather", "alltoall", "direct", "hierarchical"}) {
    TrainConfig config = config_of({.world = 4, .tp = 2, .etp = 2, .ep = 2});
    config.model.strategy = strategy;
    EXPECT_EQ(find_difference(config, /*ranks_per_node=*/2), "") << strategy;
  }
}

TEST(Training, LayoutAndPaddingDoNotMatter) {
  for (const Layout layout : {Layout::kPacked, Layout::kBatchFirst, Layout::kSequenceFirst}) {
    TrainConfig config = config_of({.world = 4, .tp = 2, .cp = 2, .ep = 4});
    config.tokens = {.layout = layout, .alignment = 8};
    EXPECT_EQ(find_difference(config), "") << train::kLayoutNames[static_cast<size_t>(layout)];
  }
}

TEST(Training, ReplicatedTokensCountOnce) {
  TrainConfig config = config_of({.world = 4, .tp = 2, .ep = 4});
  config.tokens.replicated = true;
  EXPECT_EQ(find_difference(config), "");
  config.mesh = {.world = 4, .tp = 2, .cp = 2, .etp = 2, .ep = 1};
  EXPECT_EQ(find_difference(config), "");
}

TEST(Training, MomentumEqualsOneRank) {
  TrainConfig config = config_of({.world = 4, .etp = 2, .ep = 1});
  config.momentum = 0.5;
  EXPECT_EQ(find_difference(config), "");
}

TEST(Training, RanksMayHaveNoTokens) {
  const TrainConfig config = config_of({.world = 4, .tp = 2, .ep = 4});
  const std::vector<TrainResult> results = train_on_threads(config);
  const bool some_rank_has_none =
      std::any_of(results.begin(), results.end(), [](const TrainResult& result) {
        return std::any_of(result.steps.begin(), result.steps.end(), [](const StepReport& step) {
          return step.num_local_tokens == 0 && step.num_tokens > 0;
        });
      });
  EXPECT_TRUE(some_rank_has_none);
  for (const TrainResult& result : results) {
    EXPECT_EQ(difference_from_one_rank(result, config), "");
  }
}

TEST(Training, ExpertsMayNeverGetTokens) {
  TrainConfig config = config_of({.world = 4, .ep = 4});  // of 2, 2, 1 and 1 experts
  config.model.idle_experts = 2;
  for (const TrainResult& result : train_on_threads(config)) {
    EXPECT_EQ(difference_from_one_rank(result, config), "");
    for (const char* name : {"block0.w1", "block0.b1", "block1.w2", "block1.b2"}) {
      const std::vector<double>& grad = result.first_gradients.at(name);
      const auto idle = grad.end() - static_cast<int64_t>(grad.size()) / 3;
      EXPECT_TRUE(std::all_of(idle, grad.end(), [](double value) { return value == 0.0; })) << name;
      EXPECT_TRUE(std::any_of(grad.begin(), idle, [](double value) { return value != 0.0; }))
          << name;
    }
  }
}

TEST(Training, SinglePrecisionEqualsOneRank) {
  for (const MeshShape& mesh : {MeshShape{.world = 4, .tp = 2, .ep = 4}, kEveryAxis}) {
    TrainConfig config = config_of(mesh, /*steps=*/10);
    config.dtype = DType::kF32;
    EXPECT_EQ(find_difference(config), "");
  }
}

TEST(Training, TheLossFallsByAThird) {
  const TrainResult result = train::train_on_one_rank({.steps = 50});
  EXPECT_LT(result.steps.back().text_loss, 2.0 / 3.0 * result.steps.front().text_loss);
}

// The comparison must detect mistakes.

std::string find_mistake(const MeshShape& mesh, Mistake mistake,
                         const train::TokenOptions& tokens = {}) {
  TrainConfig config = config_of(mesh);
  config.mistake = mistake;
  config.tokens = tokens;
  return find_difference(config);
}

TEST(TrainingMistakes, NaivePlacementOfShardsIsFound) {
  EXPECT_NE(find_mistake({.world = 2, .tp = 2}, Mistake::kNaivePlacement,
                         {.layout = Layout::kBatchFirst}),
            "");
  EXPECT_NE(find_mistake({.world = 2, .cp = 2}, Mistake::kNaivePlacement), "");
}

TEST(TrainingMistakes, AveragedGradientsAreFound) {
  EXPECT_NE(find_mistake({.world = 2, .ep = 2}, Mistake::kAveragedGradients), "");
  EXPECT_NE(find_mistake({.world = 2, .tp = 2, .ep = 1}, Mistake::kAveragedGradients), "");
}

TEST(TrainingMistakes, ReplicatedTokensThatCountTwiceAreFound) {
  EXPECT_NE(find_mistake({.world = 2, .tp = 2}, Mistake::kAllowedReplicas, {.replicated = true}),
            "");
}

TEST(TrainingMistakes, ReplicatedTokensAreRefused) {
  TrainConfig config = config_of({.world = 4, .tp = 2});
  config.mistake = Mistake::kUntoldReplicas;
  config.tokens.replicated = true;
  const auto errors = try_ranks(4, [&](Group& world) { train::train(world, config); });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(message_of([&] {
                  if (error) std::rethrow_exception(error);
                }),
                ::testing::HasSubstr("replicated_over"));
  }
}

TEST(TrainingMistakes, SkippedEmptyExpertsAreFound) {
  EXPECT_NE(find_mistake({.world = 4, .ep = 4}, Mistake::kSkippedEmptyExperts), "");
}

}  // namespace
}  // namespace crossdock
