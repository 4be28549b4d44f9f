#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "crossdock/dtype.hpp"

namespace crossdock {

/// What turns logits into the scores that choose experts and weigh them.
enum class Score : uint8_t {
  kSoftmax,           // over all experts, before the choice
  kSoftmaxAfterTopK,  // chosen by logits, softmax over the chosen
  kSigmoid,
  kSqrtSoftplus  // sqrt(log(1 + exp(logit)))
};

inline constexpr std::array<std::string_view, 4> kScoreNames = {"softmax", "softmax_after_top_k",
                                                                "sigmoid", "sqrt_softplus"};

constexpr std::string_view name_of(Score score) {
  return kScoreNames[static_cast<size_t>(score)];
}
/// The inverse of name_of; throws Error(kInvalidArgument) that lists the names.
Score parse_score(std::string_view name);

/// Score of a group of experts, for the choice of groups.
enum class GroupScore : uint8_t {
  kTopShare,  // sum of its K / group_top_k best biased scores; group_top_k must divide K
  kTop2       // sum of its 2 best
};

/// Over what the auxiliary loss balances. The formula is the same; what differs is over which
/// tokens routes are counted (see RouterStatistics, and MoeForwardArgs::earlier).
enum class BalanceScope : uint8_t {
  kBatch,       // the tokens of a micro-batch, on the ranks of a stated group
  kSequence,    // every sequence for itself; the mean over sequences
  kGlobalBatch  // as kBatch, with the routes and tokens of the step's earlier micro-batches
};

struct RouterConfig {
  int64_t num_experts = 0;    // E
  int64_t top_k = 0;          // K
  int64_t width = 0;          // D
  DType dtype = DType::kF32;  // of x: fp64, fp32, bf16 or fp16; logits are fp32, fp64 for fp64

  Score score = Score::kSoftmax;
  int64_t num_groups = 1;  // G; the choice is limited to the best group_top_k groups
  int64_t group_top_k = 1;
  GroupScore group_score = GroupScore::kTopShare;
  /// Weights are divided by (their sum + 1e-20), where K > 1. Unset: for kSigmoid and
  /// kSqrtSoftplus.
  std::optional<bool> normalise = {};
  double scaling = 1.0;  // of the weights, after all else

  double aux_loss_coeff = 0.0;
  BalanceScope aux_loss_scope = BalanceScope::kBatch;
  double z_loss_coeff = 0.0;

  double jitter = 0.0;  // logits see x times a random factor in [1 - jitter, 1 + jitter)
  /// For benchmarks: slot k of token t goes to expert (t * K + k) mod E; weights from the scores.
  bool force_balance = false;

  bool normalises() const {
    if (top_k <= 1 || score == Score::kSoftmaxAfterTopK) return false;
    return normalise.value_or(score == Score::kSigmoid || score == Score::kSqrtSoftplus);
  }
};

}  // namespace crossdock
