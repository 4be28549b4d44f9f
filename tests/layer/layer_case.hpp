#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "crossdock/crossdock.hpp"
#include "crossdock/moe_layer.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/testing/reference_router.hpp"

namespace crossdock {

/// A layer, its parameters and the tokens of all ranks. Values belong to global tokens and experts,
/// so that the same tokens can be spread over any number of ranks.
struct LayerCase {
  MoeLayerConfig config;
  std::vector<int64_t> tokens_per_rank;        // [P]
  std::vector<double> x;                       // [sum of T, D]
  std::vector<double> grad_out;                // [sum of T, D]
  std::vector<uint8_t> mask;                   // [sum of T]; empty: no padding
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

struct LayerCaseOptions {
  MoeLayerConfig config;
  std::vector<int64_t> tokens_per_rank;
  bool biases = false;  // of gate and experts
  bool expert_bias = false;
  bool mask = false;  // every third token is padding
};

/// Random values, rounded to the dtype.
LayerCase make_case(const LayerCaseOptions& options);

/// The same tokens on other ranks.
LayerCase spread(LayerCase layer_case, std::vector<int64_t> tokens_per_rank);

/// What one rank computed or should have. Gradients of gate, bias and shared experts are those of
/// its own tokens.
struct RankResult {
  std::vector<double> out;     // [T, D]
  std::vector<double> grad_x;  // [T, D]
  std::vector<double> grad_gate;
  std::vector<double> grad_gate_bias;
  std::vector<reference::MlpWeights> experts;  // [E]; gradients, empty at other ranks
  reference::MlpWeights shared;
  RouterLosses losses;
  std::vector<int64_t> load;  // [E], of the group
};

/// By the reference, in fp64; one for every rank.
std::vector<RankResult> run_reference(const LayerCase& layer_case);

/// The parameters of one rank as tensors, and room for their gradients (filled with NaN).
class RankParameters {
 public:
  RankParameters(const LayerCase& layer_case, const Group& group, double initial_gradient);
  MoeLayerWeights weights() const;
  MoeLayerGradients grads() const;
  /// The gradients, in the form of RankResult.
  void read_gradients(const LayerCase& layer_case, RankResult& result) const;

 private:
  std::vector<int64_t> local_experts_;
  OwnedTensor gate_, gate_bias_, expert_bias_, grad_gate_, grad_gate_bias_;
  OwnedTensor experts_[4], grad_experts_[4], shared_[4], grad_shared_[4];  // w1, w2, b1, b2
};

/// The tokens of one rank as tensors.
struct RankTokens {
  OwnedTensor x;         // [T, D]
  OwnedTensor grad_out;  // [T, D]
  OwnedTensor mask;      // [T], or not given

  RankTokens(const LayerCase& layer_case, int rank);
};

/// One forward and one backward by the layer. Collective.
RankResult run_layer(Group& group, const LayerCase& layer_case, MoeLayerOptions options = {});

/// On thread ranks.
std::vector<RankResult> run_layer_on_threads(const LayerCase& layer_case,
                                             ThreadOptions options = {});

/// Empty if `got` is `wanted` within `tolerance` times the largest magnitude of each array;
/// otherwise what differs.
std::string find_difference(const RankResult& got, const RankResult& wanted, double tolerance);

/// out, grad_x and the experts' gradients of all ranks, one after the other: what must have the
/// same bits for any number of ranks.
std::vector<double> shared_bits(const std::vector<RankResult>& ranks);

}  // namespace crossdock
