#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "crossdock/crossdock.hpp"
#include "layer/layer_case.hpp"

namespace crossdock {

/// Moves a tensor to other memory.
using MoveTensor = std::function<OwnedTensor(const OwnedTensor&)>;

/// The parameters of one rank as tensors, and memory for their gradients.
class RankParameters {
 public:
  RankParameters(const LayerCase& layer_case, const Group& group, double initial_gradient);
  MoeLayerWeights weights() const;
  MoeLayerGradients grads() const;
  /// The gradients, in the form of RankResult.
  void read_gradients(const LayerCase& layer_case, RankResult& result) const;
  void move(const MoveTensor& move);

 private:
  std::vector<int64_t> local_experts_;
  OwnedTensor gate_, gate_bias_, expert_bias_, grad_gate_, grad_gate_bias_;
  OwnedTensor experts_[4], grad_experts_[4], shared_[4], grad_shared_[4];  // w1, w2, b1, b2
};

/// The tokens of one rank as tensors.
struct RankTokens {
  OwnedTensor x;           // [T, D]
  OwnedTensor grad_out;    // [T, D]
  OwnedTensor mask;        // [T], or empty
  OwnedTensor forced_ids;  // [T, K], or empty

  RankTokens(const LayerCase& layer_case, int rank);
  void move(const MoveTensor& move);
};

/// A layer on one rank, with its parameters and tokens.
struct LayerOnRank {
  const LayerCase& layer_case;
  MoeLayer layer;
  RankParameters parameters;
  RankTokens tokens;

  /// `token_rank`: whose tokens; default: those of group.rank().
  LayerOnRank(Group& group, const LayerCase& layer_case_in, MoeLayerOptions options = {},
              double initial_gradient = 0.0, std::optional<int> token_rank = std::nullopt);

  MoeForwardArgs forward_args() const;
  MoeBackwardArgs backward_args(MoeSaved& saved) const;
  MoeForwardResult forward() { return layer.forward(forward_args()); }
  OwnedTensor backward(MoeSaved& saved) { return layer.backward(backward_args(saved)); }
  /// After a backward.
  RankResult result(const MoeForwardResult& forward_result, const OwnedTensor& grad_x) const;
};

/// One forward and one backward by the layer. Collective.
RankResult run_layer(Group& group, const LayerCase& layer_case, MoeLayerOptions options = {});

/// On thread ranks.
std::vector<RankResult> run_layer_on_threads(const LayerCase& layer_case,
                                             ThreadOptions options = {});

}  // namespace crossdock
