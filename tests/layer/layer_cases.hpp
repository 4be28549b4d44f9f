#pragma once

#include <string>
#include <vector>

#include "layer/layer_on_rank.hpp"

namespace crossdock {

struct NamedCase {
  std::string name;
  LayerCaseOptions options;
};

/// Small versions of published models' layers, in fp64; together they use every part. For any
/// number of ranks; the tokens are uneven and some ranks have none.
inline std::vector<NamedCase> list_layer_cases(int num_ranks) {
  std::vector<int64_t> even(static_cast<size_t>(num_ranks), 6);
  std::vector<int64_t> uneven;
  for (int rank = 0; rank < num_ranks; ++rank) uneven.push_back(rank % 3 == 1 ? 0 : 5 + 2 * rank);
  std::vector<NamedCase> cases;

  MoeLayerConfig plain;
  plain.router.num_experts = 6;
  plain.router.top_k = 2;
  plain.router.width = 8;
  plain.experts.inner = 5;
  plain.experts.dtype = DType::kF64;
  cases.push_back({"softmax", {.config = plain, .tokens_per_rank = even}});

  MoeLayerConfig shared = plain;
  shared.shared_inner = 7;
  shared.experts.activation = Activation::kClampedSwiglu;
  shared.experts.interleaved = true;
  shared.experts.weights_in = WeightsIn::kExperts;
  shared.router.score = Score::kSoftmaxAfterTopK;
  cases.push_back({"gpt_oss_with_shared_experts_and_weights_in_experts",
                   {.config = shared, .tokens_per_rank = uneven, .biases = true}});

  MoeLayerConfig grouped = plain;
  grouped.router.score = Score::kSigmoid;
  grouped.router.num_experts = 8;
  grouped.router.top_k = 4;
  grouped.router.num_groups = 4;
  grouped.router.group_top_k = 2;
  grouped.router.scaling = 2.5;
  grouped.router.aux_loss_coeff = 0.3;
  grouped.router.z_loss_coeff = 0.2;
  grouped.shared_inner = 4;
  grouped.dispatch.alignment = 8;
  cases.push_back({"deepseek_with_losses_and_masks",
                   {.config = grouped,
                    .tokens_per_rank = uneven,
                    .biases = true,
                    .expert_bias = true,
                    .mask = true}});

  MoeLayerConfig capacity = plain;
  capacity.router.aux_loss_coeff = 0.5;
  capacity.dispatch.capacity = Capacity{.factor = 0.5, .policy = DropPolicy::kWeight};
  capacity.experts.activation = Activation::kGeluTanh;
  capacity.experts.recompute = true;
  cases.push_back(
      {"capacity_and_recomputed_hidden_rows", {.config = capacity, .tokens_per_rank = uneven}});

  MoeLayerConfig placed = plain;  // all experts on the last rank, one route per token
  placed.router.top_k = 1;
  placed.dispatch.placement.assign(6, num_ranks - 1);
  cases.push_back({"one_rank_has_all_experts", {.config = placed, .tokens_per_rank = uneven}});

  MoeLayerConfig few = plain;  // fewer experts than most groups have ranks
  few.router.num_experts = 2;
  few.router.top_k = 2;
  cases.push_back(
      {"ranks_without_experts", {.config = few, .tokens_per_rank = uneven, .mask = true}});
  return cases;
}

}  // namespace crossdock
