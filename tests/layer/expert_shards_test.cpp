// Expert tensor parallelism: shards of parameters, and layers whose experts are sharded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "layer/etp_cases.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

constexpr double kTolerance = 1e-11;

void expect_reference(const LayerCase& layer_case, const std::string& name,
                      const ThreadOptions& options = {}) {
  const std::vector<RankResult> wanted = run_reference(layer_case);
  const std::vector<RankResult> got = run_layer_on_threads(layer_case, options);
  for (size_t rank = 0; rank < got.size(); ++rank) {
    EXPECT_EQ(find_difference(got[rank], wanted[rank], kTolerance), "")
        << name << ", " << layer_case.config.strategy << ", etp " << layer_case.config.etp
        << ", rank " << rank << " of " << got.size();
  }
}

TEST(ExpertShards, OfALayerGiveTheValuesOfWholeExperts) {
  struct Mesh {
    int num_ranks;
    int64_t etp;
  };
  for (const auto& [num_ranks, etp] : {Mesh{2, 2}, {4, 2}, {4, 4}, {6, 2}}) {
    for (const NamedCase& named : list_etp_cases(num_ranks, etp)) {
      for (const std::string& strategy : strategy_names()) {
        LayerCase layer_case = make_case(named.options);
        layer_case.config.strategy = strategy;
        expect_reference(layer_case, named.name);
      }
    }
  }
}

TEST(ExpertShards, GiveTheValuesOfWholeExpertsOnSeveralNodes) {
  for (const int ranks_per_node : {1, 2, 3}) {
    const NamedCase named = list_etp_cases(6, 2)[2];
    for (const std::string& strategy : strategy_names()) {
      LayerCase layer_case = make_case(named.options);
      layer_case.config.strategy = strategy;
      expect_reference(layer_case, named.name, {.ranks_per_node = ranks_per_node});
    }
  }
}

TEST(ExpertShards, GiveTheValuesOfWholeExpertsWithPartialSumsAndOverlap) {
  for (const std::string& strategy : strategy_names()) {
    LayerCase layer_case = make_case(list_etp_cases(4, 2)[2].options);
    layer_case.config.strategy = strategy;
    layer_case.config.overlap_chunks = 3;
    expect_reference(layer_case, "overlap", {.ranks_per_node = 2});
    for (const PartialSums sums : {PartialSums::kF32, PartialSums::kRowType}) {
      layer_case.config.dispatch.partial_sums = sums;
      expect_reference(layer_case, "partial sums", {.ranks_per_node = 2});
    }
  }
}

TEST(ExpertShards, TakeAnyRoutes) {
  const LayerCase plain = make_case(list_etp_cases(4, 2)[0].options);
  for (const std::string& strategy : strategy_names()) {
    LayerCase layer_case = plain;
    layer_case.config.strategy = strategy;
    expect_reference(one_expert_takes_all(layer_case), "one expert takes all");
    expect_reference(with_unused_slots(layer_case), "unused slots");
    expect_reference(spread(layer_case, {0, 0, 0, first_token(plain, 4)}), "one rank has tokens");
  }
}

// Router, capacity and losses see whole experts.
TEST(ExpertShards, ChangeNeitherDropsNorLoadsNorLosses) {
  LayerCaseOptions options = list_layer_cases(4)[3].options;
  options.tokens_per_rank = {5, 0, 9, 11};
  for (const DropPolicy policy : {DropPolicy::kPosition, DropPolicy::kWeight}) {
    options.config.dispatch.capacity->policy = policy;
    LayerCase layer_case = make_case(options);
    std::vector<MoeDecision> whole(4);
    std::vector<MoeDecision> sharded(4);
    for (std::vector<MoeDecision>* decisions : {&whole, &sharded}) {
      layer_case.config.etp = decisions == &whole ? 1 : 2;
      run_ranks(4, [&](Group& group) {
        LayerOnRank rank(group, layer_case);
        (*decisions)[static_cast<size_t>(group.rank())] = rank.forward().saved.decision;
      });
    }
    int64_t num_dropped = 0;
    for (size_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(sharded[rank].dropped, whole[rank].dropped);
      EXPECT_EQ(sharded[rank].load, whole[rank].load);
      EXPECT_EQ(sharded[rank].losses.aux, whole[rank].losses.aux);
      EXPECT_EQ(std::ssize(whole[rank].dropped), 6);
      num_dropped += std::accumulate(whole[rank].dropped.begin(), whole[rank].dropped.end(), 0LL);
    }
    EXPECT_GT(num_dropped, 0);
  }
}

TEST(ExpertShards, HaveTheSameBitsWithEveryStrategyAndNumberOfThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    LayerCaseOptions options = list_etp_cases(4, 2)[1].options;
    options.config.experts.dtype = dtype;
    LayerCase layer_case = make_case(options);
    const std::vector<double> wanted = shared_bits(run_layer_on_threads(layer_case));
    for (const std::string& strategy : strategy_names()) {
      layer_case.config.strategy = strategy;
      const std::vector<double> got =
          shared_bits(run_layer_on_threads(layer_case, {.ranks_per_node = 2}));
      ASSERT_EQ(got.size(), wanted.size());
      EXPECT_EQ(reference::compare(got, wanted).num_different, 0) << strategy;
    }
    std::vector<RankResult> results(4);
    const auto pool = std::make_shared<ThreadPool>(1);
    run_ranks(4, [&](Group& group) {
      results[static_cast<size_t>(group.rank())] = run_layer(group, layer_case, {.pool = pool});
    });
    EXPECT_EQ(shared_bits(results), wanted);
  }
}

// The partial results are (1 + 3/128)^2 and -(1 + 6/128): in bf16 both would be 1 + 6/128.
TEST(ExpertShards, PartialResultsAreNotRounded) {
  MoeLayerConfig config;
  config.router.num_experts = 1;
  config.router.top_k = 1;
  config.router.width = 1;
  config.experts.inner = 2;
  config.experts.activation = Activation::kSquaredRelu;
  config.experts.dtype = DType::kBF16;
  config.etp = 2;
  run_ranks(2, [&](Group& group) {
    const bool is_first = group.rank() == 0;
    const OwnedTensor gate = reference::to_tensor(DType::kBF16, {1, 1}, {1.0});
    const OwnedTensor w1 =
        reference::to_tensor(DType::kBF16, {1, 1, 1}, {is_first ? 1.0 + 3.0 / 128 : 1.0});
    const OwnedTensor w2 =
        reference::to_tensor(DType::kBF16, {1, 1, 1}, {is_first ? 1.0 : -(1.0 + 6.0 / 128)});
    const size_t T = is_first ? 1 : 0;
    const OwnedTensor x = reference::to_tensor(DType::kBF16, {static_cast<int64_t>(T), 1},
                                               std::vector<double>(T, 1.0));
    MoeLayer layer(group, config);
    const MoeForwardResult result = layer.forward(
        {.weights = {.gate = {.weight = gate.view}, .experts = {.w1 = w1.view, .w2 = w2.view}},
         .x = x.view});
    EXPECT_EQ(reference::to_values(result.out), std::vector<double>(T, 9.0 / 16384));
  });
}

TEST(ExpertShards, AreRefusedIfTheyCannotBe) {
  struct Wrong {
    std::string words;
    std::function<void(MoeLayerConfig&)> change;
  };
  const std::vector<Wrong> list = {
      {"etp (3) must be at least 1 and divide the number of ranks of the group (4)",
       [](MoeLayerConfig& c) { c.etp = 3; }},
      {"etp (0) must be at least 1", [](MoeLayerConfig& c) { c.etp = 0; }},
      {"etp must be from 1 to F (1)", [](MoeLayerConfig& c) { c.experts.inner = 1; }},
      {"placement of expert 0 must be an ep rank in [0, 2), got 3",
       [](MoeLayerConfig& c) { c.dispatch.placement.assign(6, 3); }}};
  const LayerCase layer_case = make_case(list_etp_cases(4, 2)[0].options);
  for (const Wrong& wrong : list) {
    run_ranks(4, [&](Group& group) {
      expect_refused(group, wrong.words, [&] {
        const RankParameters parameters(layer_case, group, 0.0);
        const RankTokens tokens(layer_case, group.rank());
        MoeLayerConfig config = layer_case.config;
        wrong.change(config);
        MoeLayer layer(group, config);
        (void)layer.forward({.weights = parameters.weights(), .x = tokens.x.view});
      });
    });
  }
}

std::vector<double> counted(int64_t count, double first) {
  std::vector<double> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

struct WholeExperts {
  ExpertsConfig config;
  OwnedTensor w1, w2, b1, b2;

  explicit WholeExperts(const ExpertsConfig& config_in) : config(config_in) {
    const int64_t E = config.num_local_experts;
    const int64_t hidden = config.hidden_width();
    const auto made = [](Shape shape, double first) {
      return reference::to_tensor(DType::kF32, shape, counted(shape.num_elements(), first));
    };
    w1 = made({E, hidden, config.width}, 0);
    w2 = made({E, config.width, config.inner}, 10000);
    b1 = made({E, hidden}, 20000);
    b2 = made({E, config.width}, 30000);
  }
  ExpertWeights weights() const { return {w1.view, w2.view, b1.view, b2.view}; }
};

TEST(ExpertShards, AreTheColumnsOfF) {
  MoeLayerConfig config;
  config.router.width = 3;
  config.experts = {.num_local_experts = 1, .width = 3, .inner = 5};
  for (const auto& [activation, interleaved] : {std::pair{Activation::kSwiglu, false},
                                                {Activation::kSwiglu, true},
                                                {Activation::kGelu, false}}) {
    config.experts.activation = activation;
    config.experts.interleaved = interleaved;
    for (config.etp = 1; config.etp <= 5; ++config.etp) {
      const WholeExperts whole(config.experts);
      const reference::MlpWeights values{
          reference::to_values(whole.w1), reference::to_values(whole.w2),
          reference::to_values(whole.b1), reference::to_values(whole.b2)};
      for (int j = 0; j < config.etp; ++j) {
        const OwnedExperts part =
            cut_expert_shard(config.experts, {.etp = config.etp, .index = j}, whole.weights());
        const reference::MlpWeights wanted = shard_of(config, values, j);
        EXPECT_EQ(reference::to_values(part.w1), wanted.w1);
        EXPECT_EQ(reference::to_values(part.w2), wanted.w2);
        EXPECT_EQ(reference::to_values(part.b1), wanted.b1);
        EXPECT_EQ(reference::to_values(part.b2), wanted.b2);
      }
    }
  }
}

TEST(ExpertShards, JoinToWholeExperts) {
  const ExpertsConfig config{.num_local_experts = 2, .width = 3, .inner = 5};
  const WholeExperts whole(config);
  const WholeExperts joined(config);
  for (const TensorView& view : {joined.w1.view, joined.w2.view, joined.b1.view, joined.b2.view}) {
    std::fill_n(static_cast<float*>(view.data), view.num_elements(), -1.0F);
  }
  for (int64_t j = 0; j < 3; ++j) {
    const ExpertShard shard{.etp = 3, .index = j};
    const OwnedExperts part = cut_expert_shard(config, shard, whole.weights());
    join_expert_shard(config, shard, part.weights(),
                      {joined.w1.view, joined.w2.view, joined.b1.view, joined.b2.view});
  }
  EXPECT_EQ(reference::to_values(joined.w1), reference::to_values(whole.w1));
  EXPECT_EQ(reference::to_values(joined.w2), reference::to_values(whole.w2));
  EXPECT_EQ(reference::to_values(joined.b1), reference::to_values(whole.b1));
  EXPECT_EQ(reference::to_values(joined.b2), reference::to_values(whole.b2));
  EXPECT_THAT(
      message_of([&] { (void)cut_expert_shard(config, {.etp = 6, .index = 0}, whole.weights()); }),
      HasSubstr("etp must be from 1 to F (5)"));
}

TEST(ExpertShards, RoutesGoToEveryShardAndTheirGradientsAreSummed) {
  const std::vector<int64_t> ids = {2, -1, 0, 1};
  const std::vector<float> weights = {0.5F, 0.0F, 0.25F, 0.75F};
  const ShardedRoutes routes =
      shard_routes({.expert_ids = {ids.data(), {2, 2}}, .weights = {weights.data(), {2, 2}}}, 3);
  EXPECT_EQ(reference::to_values(routes.expert_ids),
            (std::vector<double>{6, 7, 8, -1, -1, -1, 0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(reference::to_values(routes.weights),
            (std::vector<double>{0.5, 0.5, 0.5, 0, 0, 0, 0.25, 0.25, 0.25, 0.75, 0.75, 0.75}));
  const std::vector<double> grads = {1, 2, 4, 0, 0, 0, 8, 16, 32, -1, -2, -4};
  std::vector<double> sums(4);
  sum_over_shards(ConstTensorView(grads.data(), {2, 6}), TensorView(sums.data(), {2, 2}));
  EXPECT_EQ(sums, (std::vector<double>{7, 0, 56, -7}));
  const DispatchConfig config = shard_experts({.num_experts = 3, .top_k = 2, .width = 4}, 2, 4);
  EXPECT_EQ(config.num_experts, 6);
  EXPECT_EQ(config.top_k, 4);
  EXPECT_EQ(config.placement, (std::vector<int32_t>{0, 1, 0, 1, 2, 3}));
}

}  // namespace
}  // namespace crossdock
