// A layer through the C API gives the values of the C++ API.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include "capi/c_ranks.hpp"
#include "crossdock/moe_layer.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::capi_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t E = 4;
constexpr int64_t E_local = 2;
constexpr int64_t D = 4;
constexpr int64_t F = 3;
constexpr int64_t T = 6;
constexpr double kAuxLossCoeff = 0.5;

struct Tensors {
  std::vector<float> gate = values(E * D, 5);
  std::vector<float> w1;
  std::vector<float> w2;
  std::vector<float> x;
  std::vector<float> grad_out;

  explicit Tensors(int rank)
      : w1(values(E_local * 2 * F * D, 7 + rank)),
        w2(values(E_local * D * F, 11 + rank)),
        x(values(T * D, 13 + rank)),
        grad_out(values(T * D, 17 + rank)) {}

  static std::vector<float> values(int64_t count, int64_t step) {
    std::vector<float> made_values;
    for (int64_t i = 0; i < count; ++i) {
      made_values.push_back(static_cast<float>((i * step) % 19 - 9) / 8.0F);
    }
    return made_values;
  }
};

struct Outcome {
  std::vector<float> out = std::vector<float>(T * D);
  std::vector<float> grad_x = std::vector<float>(T * D);
  std::vector<float> grad_gate = std::vector<float>(E * D);
  std::vector<float> grad_w1 = std::vector<float>(E_local * 2 * F * D);
  std::vector<int64_t> load = std::vector<int64_t>(E);
  double aux_loss = 0;
};

Outcome run_cpp(Group& group, const Tensors& tensors) {
  MoeLayerConfig config;
  config.router.num_experts = E;
  config.router.top_k = 2;
  config.router.width = D;
  config.router.aux_loss_coeff = kAuxLossCoeff;
  config.experts.inner = F;
  MoeLayer layer(group, config);
  const MoeLayerWeights weights{.gate = {.weight = {tensors.gate.data(), {E, D}}},
                                .experts = {.w1 = {tensors.w1.data(), {E_local, 2 * F, D}},
                                            .w2 = {tensors.w2.data(), {E_local, D, F}}}};
  Outcome outcome;
  MoeForwardResult forward = layer.forward(
      {.weights = weights, .x = {tensors.x.data(), {T, D}}, .out = {outcome.out.data(), {T, D}}});
  outcome.aux_loss = forward.saved.decision.losses.aux;
  outcome.load = forward.saved.decision.load;
  layer.backward({.weights = weights,
                  .x = {tensors.x.data(), {T, D}},
                  .grad_out = {tensors.grad_out.data(), {T, D}},
                  .saved = &forward.saved,
                  .grads = {.gate = {outcome.grad_gate.data(), {E, D}},
                            .experts = {.w1 = {outcome.grad_w1.data(), {E_local, 2 * F, D}}}},
                  .grad_x = {outcome.grad_x.data(), {T, D}}});
  return outcome;
}

struct LayerConfigs {
  crossdock_router_config router = made<crossdock_router_config>();
  crossdock_experts_config experts = made<crossdock_experts_config>();
  crossdock_dispatch_config dispatch = made<crossdock_dispatch_config>();
  crossdock_layer_config layer = made<crossdock_layer_config>();

  explicit LayerConfigs(crossdock_group* counting_group) {
    router.num_experts = E;
    router.top_k = 2;
    router.width = D;
    router.aux_loss_coeff = kAuxLossCoeff;
    experts.inner = F;
    experts.dtype = CROSSDOCK_F32;
    layer.router = &router;
    layer.experts = &experts;
    layer.dispatch = &dispatch;
    layer.counting_group = counting_group;
  }
};

crossdock_layer* make_layer(crossdock_group* group, crossdock_group* counting_group = nullptr) {
  const LayerConfigs configs(counting_group);
  crossdock_layer* layer = nullptr;
  EXPECT_OK(crossdock_layer_create(group, &configs.layer, &layer));
  return layer;
}

crossdock_layer_forward_args forward_args(const Tensors& tensors) {
  auto forward = made<crossdock_layer_forward_args>();
  forward.weights.gate = tensor(tensors.gate, E, D);
  forward.weights.experts.w1 =
      crossdock_tensor_3d(tensors.w1.data(), CROSSDOCK_F32, E_local, 2 * F, D);
  forward.weights.experts.w2 = crossdock_tensor_3d(tensors.w2.data(), CROSSDOCK_F32, E_local, D, F);
  forward.x = tensor(tensors.x, T, D);
  return forward;
}

Outcome run_c(crossdock_layer* layer, const Tensors& tensors, bool delay_dw = false) {
  Outcome outcome;
  const crossdock_layer_forward_args forward = forward_args(tensors);
  auto result = made<crossdock_layer_forward_result>();
  result.out.tensor = tensor(outcome.out, T, D);
  crossdock_layer_saved* saved = nullptr;
  EXPECT_OK(crossdock_layer_forward(layer, &forward, &result, &saved));
  outcome.aux_loss = result.aux_loss;
  EXPECT_OK(crossdock_layer_saved_load(saved, outcome.load.data()));
  std::vector<double> losses(5);
  EXPECT_OK(crossdock_layer_saved_losses(saved, losses.data()));
  EXPECT_EQ(losses, (std::vector<double>{result.aux_loss, result.z_loss, result.aux_batch_loss,
                                         result.aux_sequence_loss, result.aux_global_batch_loss}));
  EXPECT_EQ(result.device_losses.num_dims, 0);  // tokens in host memory

  auto backward = made<crossdock_layer_backward_args>();
  backward.weights = forward.weights;
  backward.x = forward.x;
  backward.grad_out = tensor(tensors.grad_out, T, D);
  backward.grads.gate = tensor(outcome.grad_gate, E, D);
  backward.grads.experts.w1 =
      crossdock_tensor_3d(outcome.grad_w1.data(), CROSSDOCK_F32, E_local, 2 * F, D);
  crossdock_output grad_x{};
  grad_x.tensor = tensor(outcome.grad_x, T, D);
  backward.delay_dw = delay_dw ? 1 : 0;
  EXPECT_OK(crossdock_layer_backward(layer, &backward, saved, &grad_x));
  if (delay_dw) {
    EXPECT_EQ(outcome.grad_w1, std::vector<float>(outcome.grad_w1.size()));
    EXPECT_OK(crossdock_layer_backward_dw(layer, &backward, saved));
  }
  EXPECT_EQ(grad_x.owner, nullptr);
  crossdock_layer_saved_destroy(saved);
  return outcome;
}

TEST(CLayer, ForwardAndBackwardHaveTheValuesOfTheCppApi) {
  std::vector<Outcome> wanted(kRanks);
  run_ranks(kRanks, [&](Group& group) {
    wanted[static_cast<size_t>(group.rank())] = run_cpp(group, Tensors(group.rank()));
  });
  run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
    crossdock_layer* layer = make_layer(group);
    ASSERT_NE(layer, nullptr);
    int64_t num_local_experts = 0;
    EXPECT_OK(crossdock_layer_num_local_experts(layer, &num_local_experts));
    EXPECT_EQ(num_local_experts, E_local);
    for (const bool delay_dw : {false, true}) {
      const Outcome got = run_c(layer, Tensors(rank), delay_dw);
      const Outcome& want = wanted[static_cast<size_t>(rank)];
      EXPECT_EQ(got.out, want.out);
      EXPECT_EQ(got.grad_x, want.grad_x);
      EXPECT_EQ(got.grad_gate, want.grad_gate);
      EXPECT_EQ(got.grad_w1, want.grad_w1);
      EXPECT_EQ(got.load, want.load);
      EXPECT_EQ(got.aux_loss, want.aux_loss);
    }
    crossdock_layer_destroy(layer);
  });
}

TEST(CLayer, TheExpertBiasFollowsTheLoad) {
  std::vector<float> bias(3, 0.0F);
  const int64_t load[] = {3, 2, 1};
  const crossdock_tensor view = crossdock_tensor_1d(bias.data(), CROSSDOCK_F32, 3);
  EXPECT_OK(crossdock_update_expert_bias(&view, load, 0.5, 0));
  EXPECT_EQ(bias, (std::vector<float>{-0.5F, 0.0F, 0.5F}));
}

TEST(CLayer, ArgumentsThatCannotBeConvertedAreTheSameErrorOnEveryRank) {
  run_c_ranks(kRanks, [](crossdock_group* group, int rank) {
    crossdock_layer* layer = make_layer(group);
    const Tensors tensors(rank);
    auto forward = made<crossdock_layer_forward_args>();
    forward.x = tensor(tensors.x, T, D);
    auto result = made<crossdock_layer_forward_result>();
    const bool gives_none = rank == 1;
    EXPECT_EQ(crossdock_layer_forward(layer, gives_none ? nullptr : &forward, &result, nullptr),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_NE(std::string(crossdock_last_error()).find("rank "), std::string::npos);
    EXPECT_OK(crossdock_group_check(group));
    crossdock_layer_destroy(layer);
  });
}

// Only rank 1 has these values; the layer counts its losses in another group.
TEST(CLayer, AnUndefinedValueOfOneRankIsReportedByTheFirstForwardOnAll) {
  const char* const messages[] = {"rank 1: score must be in [0, 4), got 257",
                                  "rank 1: group_score must be in [0, 2), got -1",
                                  "rank 1: aux_loss_scope must be in [0, 3), got 3",
                                  "rank 1: activation must be in [0, 8), got 300",
                                  "rank 1: weights_in must be in [0, 2), got 2",
                                  "rank 1: crossdock_experts_config: dtype must be one of",
                                  "rank 1: partial_sums must be in [0, 3), got 9"};
  run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
    const int32_t members[] = {0, 1};
    crossdock_group* counting = nullptr;
    ASSERT_OK(crossdock_group_subgroup(group, members, 2, &counting));
    for (size_t i = 0; i < std::size(messages); ++i) {
      LayerConfigs configs(counting);
      const std::pair<int32_t*, int32_t> changes[] = {
          {&configs.router.score, 257},        {&configs.router.group_score, -1},
          {&configs.router.aux_loss_scope, 3}, {&configs.experts.activation, 300},
          {&configs.experts.weights_in, 2},    {&configs.experts.dtype, 99},
          {&configs.dispatch.partial_sums, 9}};
      if (rank == 1) *changes[i].first = changes[i].second;
      crossdock_layer* layer = nullptr;
      ASSERT_OK(crossdock_layer_create(group, &configs.layer, &layer));
      const Tensors tensors(rank);
      const crossdock_layer_forward_args forward = forward_args(tensors);
      auto result = made<crossdock_layer_forward_result>();
      EXPECT_EQ(crossdock_layer_forward(layer, &forward, &result, nullptr),
                CROSSDOCK_INVALID_ARGUMENT);
      EXPECT_EQ(std::string(crossdock_last_error()).find(messages[i]), 0U)
          << crossdock_last_error();
      EXPECT_OK(crossdock_group_check(group));
      EXPECT_OK(crossdock_group_check(counting));
      crossdock_layer_destroy(layer);
    }
    crossdock_group_destroy(counting);
  });
}

// The ranks refuse in the layer's group first, then in the counting group: no rank may wait there.
TEST(CLayer, ARefusalReachesTheCountingGroup) {
  run_c_ranks(kRanks, [](crossdock_group* group, int rank) {
    const int32_t members[] = {0, 1};
    crossdock_group* counting = nullptr;
    ASSERT_OK(crossdock_group_subgroup(group, members, 2, &counting));
    crossdock_layer* layer = make_layer(group, counting);
    const Tensors tensors(rank);
    const crossdock_layer_forward_args forward = forward_args(tensors);
    auto result = made<crossdock_layer_forward_result>();
    EXPECT_EQ(crossdock_layer_forward(layer, rank == 1 ? nullptr : &forward, &result, nullptr),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_STREQ(crossdock_last_error(), "rank 1: crossdock_layer_forward_args must not be NULL");
    EXPECT_OK(crossdock_group_check(group));
    EXPECT_OK(crossdock_group_check(counting));
    EXPECT_OK(crossdock_layer_forward(layer, &forward, &result, nullptr));
    EXPECT_OK(crossdock_output_release(&result.out, nullptr));
    crossdock_group_destroy(counting);
    crossdock_layer_destroy(layer);
  });
}

// Both ranks hold a shard of all experts and the same tokens.
struct ShardedCase {
  int64_t f;  // columns of this rank's shard
  std::vector<float> gate = Tensors::values(E * D, 5);
  std::vector<float> w1;
  std::vector<float> w2;
  std::vector<float> x = Tensors::values(T * D, 13);
  std::vector<float> out = std::vector<float>(T * D);

  explicit ShardedCase(int rank)
      : f(rank == 0 ? 2 : 1),
        w1(Tensors::values(E * 2 * f * D, 7 + rank)),
        w2(Tensors::values(E * D * f, 11 + rank)) {}
};

struct ShardedOutcome {
  std::vector<float> out;
  RouterLosses losses;
};

ShardedOutcome run_sharded_cpp(Group& group) {
  MoeLayerConfig config;
  config.router.num_experts = E;
  config.router.top_k = 2;
  config.router.width = D;
  config.router.aux_loss_coeffs = {.batch = 0.5, .sequence = 0.25, .global_batch = 0.125};
  config.experts.inner = F;
  config.etp = 2;
  MoeLayer layer(group, config, {.replicated_over = &group});
  ShardedCase input(group.rank());
  const MoeForwardResult forward =
      layer.forward({.weights = {.gate = {.weight = {input.gate.data(), {E, D}}},
                                 .experts = {.w1 = {input.w1.data(), {E, 2 * input.f, D}},
                                             .w2 = {input.w2.data(), {E, D, input.f}}}},
                     .x = {input.x.data(), {T, D}},
                     .out = {input.out.data(), {T, D}}});
  return {input.out, forward.saved.decision.losses};
}

// The report of this rank's slice of the tokens: each route has a row on both ranks.
void expect_report_of_shards(const crossdock_layer_saved* saved) {
  auto report = made<crossdock_layer_report>();
  EXPECT_OK(crossdock_layer_saved_report(saved, &report));
  const int64_t slice = report.expert_ids.shape[0];
  EXPECT_EQ(report.expert_ids.shape[1], 2);
  EXPECT_EQ(report.weights.shape[0], slice);
  EXPECT_EQ(report.kept_weights.shape[1], 2 * 2);
  const auto* weights = static_cast<const float*>(report.weights.data);
  const auto* kept = static_cast<const float*>(report.kept_weights.data);
  for (int64_t route = 0; route < slice * 2; ++route) {
    EXPECT_EQ(kept[2 * route], weights[route]);
    EXPECT_EQ(kept[2 * route + 1], weights[route]);
  }
  ASSERT_EQ(report.load.shape[0], E);
  const auto* load = static_cast<const int64_t*>(report.load.data);
  EXPECT_EQ(std::accumulate(load, load + E, int64_t{0}), T * 2);
  std::vector<int64_t> copy(E);
  EXPECT_OK(crossdock_layer_saved_load(saved, copy.data()));
  EXPECT_TRUE(std::equal(copy.begin(), copy.end(), load));
  ASSERT_EQ(report.rows_per_expert.shape[0], E);
  const auto* rows = static_cast<const int64_t*>(report.rows_per_expert.data);
  EXPECT_EQ(std::accumulate(rows, rows + E, int64_t{0}), T * 2);
  EXPECT_EQ(crossdock_layer_saved_report(saved, nullptr), CROSSDOCK_INVALID_ARGUMENT);
}

TEST(CLayer, TakesShardedExpertsReplicatedTokensAndSeveralLosses) {
  std::vector<ShardedOutcome> wanted(kRanks);
  run_ranks(kRanks, [&](Group& group) {
    wanted[static_cast<size_t>(group.rank())] = run_sharded_cpp(group);
  });
  EXPECT_EQ(wanted[0].out, wanted[1].out);
  run_c_ranks(kRanks, [&](crossdock_group* group, int rank) {
    auto router = made<crossdock_router_config>();
    router.num_experts = E;
    router.top_k = 2;
    router.width = D;
    router.aux_batch_coeff = 0.5;
    router.aux_sequence_coeff = 0.25;
    router.aux_global_batch_coeff = 0.125;
    auto experts = made<crossdock_experts_config>();
    experts.inner = F;
    experts.dtype = CROSSDOCK_F32;
    auto config = made<crossdock_layer_config>();
    config.router = &router;
    config.experts = &experts;
    config.etp = 2;
    config.replicated_over = group;
    crossdock_layer* layer = nullptr;
    ASSERT_OK(crossdock_layer_create(group, &config, &layer));
    int64_t num_local_experts = 0;
    EXPECT_OK(crossdock_layer_num_local_experts(layer, &num_local_experts));
    EXPECT_EQ(num_local_experts, E);
    ShardedCase input(rank);
    auto forward = made<crossdock_layer_forward_args>();
    forward.weights.gate = tensor(input.gate, E, D);
    forward.weights.experts.w1 =
        crossdock_tensor_3d(input.w1.data(), CROSSDOCK_F32, E, 2 * input.f, D);
    forward.weights.experts.w2 = crossdock_tensor_3d(input.w2.data(), CROSSDOCK_F32, E, D, input.f);
    forward.x = tensor(input.x, T, D);
    auto result = made<crossdock_layer_forward_result>();
    result.out.tensor = tensor(input.out, T, D);

    // A rank that cannot convert its arguments refuses in both groups.
    EXPECT_EQ(crossdock_layer_forward(layer, rank == 1 ? nullptr : &forward, &result, nullptr),
              CROSSDOCK_INVALID_ARGUMENT);
    crossdock_layer_saved* saved = nullptr;
    EXPECT_OK(crossdock_layer_forward(layer, &forward, &result, &saved));
    const ShardedOutcome& want = wanted[static_cast<size_t>(rank)];
    EXPECT_EQ(input.out, want.out);
    EXPECT_EQ(result.aux_loss, want.losses.aux);
    EXPECT_EQ(result.aux_batch_loss, want.losses.aux_terms.batch);
    EXPECT_EQ(result.aux_sequence_loss, want.losses.aux_terms.sequence);
    EXPECT_EQ(result.aux_global_batch_loss, want.losses.aux_terms.global_batch);
    std::vector<int64_t> dropped(E, -1);
    EXPECT_OK(crossdock_layer_saved_dropped(saved, dropped.data()));
    EXPECT_EQ(dropped, std::vector<int64_t>(E, 0));
    expect_report_of_shards(saved);
    crossdock_layer_saved_destroy(saved);

    // The result struct of an older version, which ends before the terms.
    result.struct_size = offsetof(crossdock_layer_forward_result, aux_batch_loss);
    result.aux_batch_loss = -1.0;
    EXPECT_OK(crossdock_layer_forward(layer, &forward, &result, nullptr));
    EXPECT_EQ(result.aux_batch_loss, -1.0);
    crossdock_layer_destroy(layer);
  });
}

}  // namespace
}  // namespace crossdock::capi_test
