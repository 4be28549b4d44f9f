#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "crossdock/crossdock.hpp"
#include "crossdock/moe_layer.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/testing/reference_router.hpp"

namespace crossdock {

/// A layer, its parameters and the tokens of all ranks. Values belong to global tokens and experts,
/// so the same tokens can be spread over any number of ranks.
struct LayerCase {
  MoeLayerConfig config;
  std::vector<int64_t> tokens_per_rank;        // [P]
  std::vector<double> x;                       // [sum of T, D]
  std::vector<double> grad_out;                // [sum of T, D]
  std::vector<uint8_t> mask;                   // [sum of T]; empty: no padding
  std::vector<int64_t> forced_ids;             // [sum of T, K]; empty: the router chooses
  std::vector<double> gate;                    // [E, D]
  std::vector<double> gate_bias;               // [E]; empty: none
  std::vector<double> expert_bias;             // [E]; empty: none
  std::vector<reference::MlpWeights> experts;  // [E]
  reference::MlpWeights shared;

  int num_ranks() const { return static_cast<int>(tokens_per_rank.size()); }
  DType dtype() const { return config.experts.dtype; }
  DType sum_dtype() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
  reference::MlpConfig mlp(int64_t inner) const;
};

/// The first of a rank's tokens among the tokens of all ranks.
int64_t first_token(const LayerCase& layer_case, int rank);

/// One rank's part of an array [sum of T, width].
template <typename T>
std::vector<T> part_of(const LayerCase& layer_case, int rank, const std::vector<T>& all,
                       int64_t width) {
  if (all.empty()) return {};
  const auto begin = all.begin() + first_token(layer_case, rank) * width;
  return {begin, begin + layer_case.tokens_per_rank[static_cast<size_t>(rank)] * width};
}

using MlpMember = std::vector<double> reference::MlpWeights::*;
inline constexpr MlpMember kMlpMembers[] = {&reference::MlpWeights::w1, &reference::MlpWeights::w2,
                                            &reference::MlpWeights::b1, &reference::MlpWeights::b2};

struct LayerCaseOptions {
  MoeLayerConfig config;
  std::vector<int64_t> tokens_per_rank;
  bool biases = false;  // of gate and experts
  bool expert_bias = false;
  bool mask = false;  // every third token is padding
};

/// The part of an expert's parameters (or gradients) that a rank holds: all of it without etp.
reference::MlpWeights shard_of(const MoeLayerConfig& config, const reference::MlpWeights& whole,
                               int rank);

/// The experts of a rank, ascending.
std::vector<int64_t> experts_of(const MoeLayerConfig& config, int num_ranks, int rank);

/// Random values, rounded to the dtype.
LayerCase make_case(const LayerCaseOptions& options);

/// The same tokens on other ranks.
LayerCase spread(LayerCase layer_case, std::vector<int64_t> tokens_per_rank);

/// Results of one rank, computed or expected. Gradients of gate, bias and shared experts are summed
/// over its own tokens only.
struct RankResult {
  std::vector<double> out;     // [T, D]
  std::vector<double> grad_x;  // [T, D]
  std::vector<double> grad_gate;
  std::vector<double> grad_gate_bias;
  std::vector<reference::MlpWeights> experts;  // [E]; gradients of its shard; empty elsewhere
  reference::MlpWeights shared;
  RouterLosses losses;
  std::vector<int64_t> load;  // [E], of the group
};

/// The results of every rank by the reference, in fp64.
std::vector<RankResult> run_reference(const LayerCase& layer_case);

/// The router's input on one rank, for the reference.
reference::RouterInput router_input(const LayerCase& layer_case, int rank);

/// Expects that `call` throws an Error with these words on this rank and leaves the group usable.
void expect_refused(const Group& group, const std::string& words,
                    const std::function<void()>& call);

/// Empty if `got` equals `wanted` within `tolerance` times the largest magnitude of each array;
/// otherwise the differences.
std::string find_difference(const RankResult& got, const RankResult& wanted, double tolerance);

/// out, grad_x and the experts' gradients of all ranks, concatenated: their bits must be the same
/// for any number of ranks.
std::vector<double> shared_bits(const std::vector<RankResult>& ranks);

}  // namespace crossdock
