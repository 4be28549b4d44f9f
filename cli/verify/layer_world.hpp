#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "crossdock/moe_layer.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/testing/reference_router.hpp"

namespace crossdock::cli {

/// How many routes of a layer go from which ranks to which experts.
enum class LayerRouting : uint8_t {
  kBalanced,
  kSkewed,
  kOneExpertTakesAll,
  kRankReceivesNothing,
  kRankHasNoTokens,
  kNoTokens,
  kAbsentRoutes,  // slots of -1, and tokens with no other slots
  kUnequalCounts,
  kRankWithoutExperts,
  kPadding,
  kChosen,  // by the router; all others are forced
  kLosses   // the same, with losses
};

inline constexpr std::array<std::string_view, 12> kLayerRoutingNames = {"balanced",
                                                                        "skewed",
                                                                        "one_expert_takes_all",
                                                                        "rank_receives_nothing",
                                                                        "rank_has_no_tokens",
                                                                        "no_tokens",
                                                                        "absent_routes",
                                                                        "unequal_counts",
                                                                        "rank_without_experts",
                                                                        "padding",
                                                                        "chosen",
                                                                        "losses"};

/// A layer, and the tokens and parameters of all ranks. Activation, score, biases, shared experts
/// and widths differ from routing to routing.
struct LayerWorld {
  MoeLayerConfig config;
  std::vector<reference::RouterInput> ranks;   // [P] with the parameters of the gate
  std::vector<std::vector<double>> grad_out;   // [P], each [T, D]
  std::vector<reference::MlpWeights> experts;  // [E]
  reference::MlpWeights shared;                // empty: none

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  DType dtype() const { return config.experts.dtype; }
  DType sum_dtype() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
  /// The experts of a rank.
  int64_t first_expert(int rank) const {
    return crossdock::first_expert(config.router.num_experts, num_ranks(), rank);
  }
};

/// Identical in every call; values are rounded to the dtype.
LayerWorld make_layer_world(LayerRouting routing, DType dtype, int num_ranks);

/// Results of one rank, computed or expected.
struct LayerResults {
  std::vector<double> out, grad_x;                // [T, D]
  std::vector<double> grad_gate, grad_gate_bias;  // of its tokens
  reference::MlpWeights grad_experts;             // of its experts, concatenated
  reference::MlpWeights grad_shared;              // of its tokens
  std::vector<double> load;                       // [E], of all ranks
  std::vector<double> losses;                     // aux and z
};

/// The results that the reference computes for a rank.
LayerResults expected_results(const LayerWorld& world, int rank);

}  // namespace crossdock::cli
