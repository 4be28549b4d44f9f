#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "crossdock/expert_shards.hpp"
#include "crossdock/mesh.hpp"
#include "crossdock/moe_layer.hpp"
#include "mistakes.hpp"
#include "parameter.hpp"
#include "tokens.hpp"

namespace train {

/// Identical on every rank.
struct ModelConfig {
  int64_t V = 256;  // bytes
  int64_t L = 64;   // most positions of a sequence
  int64_t D = 16;   // token width
  int64_t F = 21;   // inner width of an expert; need not be divisible by etp
  int64_t E = 6;    // experts; need not be divisible by ep
  int64_t K = 2;    // experts per token
  int64_t num_blocks = 2;
  int64_t idle_experts = 0;  // the last experts, which the router never chooses
  std::string strategy = "auto";
  bool replicated = false;  // tokens are the same on the tp ranks
  Mistake mistake = Mistake::kNone;
};

/// Sizes of a whole batch, over all ranks.
struct BatchSize {
  int64_t num_tokens = 0;     // without padding
  int64_t num_targets = 0;    // tokens with a byte to predict
  int64_t num_sequences = 0;  // that have tokens
};

/// Losses of this rank's tokens, as parts of the mean over the batch: the parts of all ranks sum to
/// the loss of the batch.
struct LossShares {
  double text = 0.0;
  double router = 0.0;  // auxiliary losses and z-loss
};

/// A block's parameters: x + moe(norm(x)).
template <typename Real>
struct Block {
  Parameter<Real> norm;            // [D]
  Parameter<Real> gate;            // [E, D]
  Parameter<Real> w1, b1, w2, b2;  // of this rank's experts; with etp, this rank's shard of them
};

/// A byte-level language model of MoE blocks, without attention, seen from one rank of a mesh.
///
/// Experts are split over ep and etp. All other parameters are on every rank, which applies them to
/// its own tokens.
template <typename Real>
class Model {
 public:
  /// Collective. The mesh must outlive the model.
  Model(crossdock::Mesh& mesh, const ModelConfig& config);

  /// Both are collective over the mesh: ranks without tokens call them, too.
  LossShares forward(const Tokens& tokens, const BatchSize& batch);
  /// Sets the gradients of this rank's parameters, not yet summed over the mesh.
  void backward(const Tokens& tokens);

  std::vector<Parameter<Real>*> parameters();
  std::vector<Block<Real>>& blocks() { return blocks_; }
  /// First expert of this rank, and its shard of each expert.
  int64_t first_expert() const { return first_expert_; }
  crossdock::ExpertsConfig whole_experts() const;  // of this rank, not cut into shards
  crossdock::ExpertShard shard() const { return shard_; }
  const ModelConfig& config() const { return config_; }

  /// Largest load of an expert of the first block in the last forward, divided by the mean.
  double imbalance() const;

 private:
  // A block's values that backward needs.
  struct SavedBlock {
    std::vector<Real> x;       // [T, D] input of the block
    std::vector<Real> normed;  // [T, D] input of the MoE layer
    crossdock::MoeSaved moe;
  };

  Parameter<Real> make_dense(const std::string& name, const crossdock::Shape& shape, double scale);
  Block<Real> make_block(const std::string& name);
  crossdock::MoeLayerWeights weights_of(const Block<Real>& block) const;
  crossdock::MoeLayerGradients grads_of(Block<Real>& block, const crossdock::MoeSaved& saved) const;

  ModelConfig config_;
  crossdock::ExpertShard shard_;
  int64_t first_expert_ = 0;
  crossdock::MoeLayer moe_;        // has no parameters of its own: serves all blocks
  std::vector<Real> expert_bias_;  // [E] keeps idle experts idle

  Parameter<Real> byte_table_;      // [V, D]
  Parameter<Real> position_table_;  // [L, D]
  std::vector<Block<Real>> blocks_;
  Parameter<Real> norm_;  // [D]
  Parameter<Real> head_;  // [V, D]

  std::vector<SavedBlock> saved_;
  std::vector<Real> x_;            // [T, D] after the last block
  std::vector<Real> normed_;       // [T, D] input of the head
  std::vector<Real> grad_logits_;  // [T, V]
};

}  // namespace train
