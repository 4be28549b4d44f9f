#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

#include "crossdock/plan.hpp"
#include "dense_layers.hpp"

namespace train {
namespace {

using crossdock::Mesh;
using crossdock::MeshAxis;
using crossdock::Shape;

crossdock::MoeLayerConfig layer_config(const ModelConfig& config, int64_t etp,
                                       crossdock::DType dtype) {
  crossdock::MoeLayerConfig layer;
  layer.router.num_experts = config.E;
  layer.router.top_k = config.K;
  layer.router.width = config.D;
  layer.router.normalise = true;
  layer.router.aux_loss_coeffs = {.batch = 0.01, .sequence = 0.01};
  layer.router.z_loss_coeff = 0.001;
  layer.experts.inner = config.F;
  layer.experts.dtype = dtype;
  layer.strategy = config.strategy;
  layer.etp = etp;
  layer.allow_equal_tokens = config.mistake == Mistake::kAllowedReplicas;
  return layer;
}

// The losses are means over the tokens of the whole batch, and over its sequences, which the ranks
// of a tp x cp group share.
crossdock::MoeLayerOptions layer_options(Mesh& mesh, const ModelConfig& config) {
  crossdock::MoeLayerOptions options;
  options.counting_group = &mesh.group(MeshAxis::kTpCpDp);
  options.sequence_group = &mesh.group(MeshAxis::kTpCp);
  const bool is_told =
      config.mistake != Mistake::kUntoldReplicas && config.mistake != Mistake::kAllowedReplicas;
  if (config.replicated && is_told) options.replicated_over = &mesh.group(MeshAxis::kTp);
  return options;
}

template <typename Real>
std::vector<Real> copy_of(const crossdock::OwnedTensor& tensor) {
  const std::span<const Real> values = tensor.view.template as<Real>();
  return {values.begin(), values.end()};
}

template <typename Real>
std::vector<Real> sum_of(const std::vector<Real>& a, std::span<const Real> b) {
  std::vector<Real> sum = a;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += b[i];
  return sum;
}

}  // namespace

template <typename Real>
Model<Real>::Model(Mesh& mesh, const ModelConfig& config)
    : config_(config),
      shard_{.etp = mesh.shape().etp, .index = mesh.coordinates().etp},
      first_expert_(crossdock::first_expert(config.E, static_cast<int>(mesh.shape().ep),
                                            mesh.coordinates().ep)),
      moe_{mesh.group(MeshAxis::kEtpEp),  // braces: all ranks make the groups in this order
           layer_config(config, shard_.etp, crossdock::DTypeOf<Real>::value),
           layer_options(mesh, config)},
      expert_bias_(static_cast<size_t>(config.E), 0) {
  std::fill_n(expert_bias_.rbegin(), config.idle_experts, Real{-100});
  byte_table_ = make_dense("byte_table", {config.V, config.D}, 1.0);
  position_table_ = make_dense("position_table", {config.L, config.D}, 0.5);
  for (int64_t b = 0; b < config.num_blocks; ++b) {
    blocks_.push_back(make_block("block" + std::to_string(b)));
  }
  norm_ = make_dense("norm", {config.D}, 0.0);
  head_ = make_dense("head", {config.V, config.D}, 0.1);
}

// Scale 0: ones, for norms.
template <typename Real>
Parameter<Real> Model<Real>::make_dense(const std::string& name, const Shape& shape, double scale) {
  const int64_t count = shape.num_elements();
  return {.name = name,
          .held = config_.replicated ? Held::kReplicated : Held::kDense,
          .shape = shape,
          .value = scale > 0.0 ? random_values<Real>(name, count, scale)
                               : std::vector<Real>(static_cast<size_t>(count), 1)};
}

// Every rank makes all experts and keeps its own: simple, and the same on every mesh.
template <typename Real>
Block<Real> Model<Real>::make_block(const std::string& name) {
  const int64_t D = config_.D;
  const int64_t F = config_.F;
  const int64_t E = config_.E;
  const auto w1 =
      random_values<Real>(name + ".w1", E * 2 * F * D, 1.0 / std::sqrt(static_cast<double>(D)));
  const auto b1 = random_values<Real>(name + ".b1", E * 2 * F, 0.1);
  const auto w2 =
      random_values<Real>(name + ".w2", E * D * F, 1.0 / std::sqrt(static_cast<double>(F)));
  const auto b2 = random_values<Real>(name + ".b2", E * D, 0.1);
  const crossdock::ExpertsConfig whole = whole_experts();
  const int64_t E_local = whole.num_local_experts;
  const crossdock::OwnedExperts mine = crossdock::cut_expert_shard(
      whole, shard_,
      {.w1 = {w1.data() + first_expert_ * 2 * F * D, {E_local, 2 * F, D}},
       .w2 = {w2.data() + first_expert_ * D * F, {E_local, D, F}},
       .b1 = {b1.data() + first_expert_ * 2 * F, {E_local, 2 * F}},
       .b2 = {b2.data() + first_expert_ * D, {E_local, D}}});

  // The layer applies the gate to this rank's part of the tokens, even if they are replicated.
  Parameter<Real> gate = make_dense(name + ".gate", {E, D}, 0.5);
  gate.held = Held::kDense;
  return {
      .norm = make_dense(name + ".norm", {D}, 0.0),
      .gate = std::move(gate),
      .w1 = {name + ".w1", Held::kExperts, mine.w1.view.shape, copy_of<Real>(mine.w1)},
      .b1 = {name + ".b1", Held::kExperts, mine.b1.view.shape, copy_of<Real>(mine.b1)},
      .w2 = {name + ".w2", Held::kExperts, mine.w2.view.shape, copy_of<Real>(mine.w2)},
      .b2 = {name + ".b2", Held::kExpertsReplicated, mine.b2.view.shape, copy_of<Real>(mine.b2)}};
}

template <typename Real>
crossdock::ExpertsConfig Model<Real>::whole_experts() const {
  return moe_.config().experts;
}

template <typename Real>
LossShares Model<Real>::forward(const Tokens& tokens, const BatchSize& batch) {
  const int64_t T = tokens.size();
  const int64_t D = config_.D;
  LossShares losses;
  saved_.clear();
  Embedding<Real>{tokens.bytes, tokens.positions, D}.forward(byte_table_.value,
                                                             position_table_.value, x_);
  for (const Block<Real>& block : blocks_) {
    SavedBlock saved{.x = std::move(x_), .normed = {}, .moe = {}};
    RmsNorm<Real>{block.norm.value}.forward(saved.x, saved.normed);
    crossdock::MoeForwardResult moe =
        moe_.forward({.weights = weights_of(block),
                      .x = {saved.normed.data(), {T, D}},
                      .mask = tokens.mask(),
                      .sequence_ids = {tokens.sequence_ids.data(), {T}},
                      .num_sequences = std::max<int64_t>(1, tokens.num_sequences),
                      .total_sequences = batch.num_sequences});
    x_ = sum_of<Real>(saved.x, moe.out.view.template as<Real>());
    losses.router += moe.saved.decision.losses.aux + moe.saved.decision.losses.z;
    saved.moe = std::move(moe.saved);
    saved_.push_back(std::move(saved));
  }
  RmsNorm<Real>{norm_.value}.forward(x_, normed_);
  const double factor = 1.0 / static_cast<double>(std::max<int64_t>(1, batch.num_targets));
  losses.text =
      factor * Head<Real>{head_.value, D}.loss(normed_, tokens.targets, factor, grad_logits_);
  return losses;
}

template <typename Real>
void Model<Real>::backward(const Tokens& tokens) {
  const int64_t T = tokens.size();
  const int64_t D = config_.D;
  for (Parameter<Real>* parameter : parameters()) {
    // The layer overwrites the gradients of the experts, with zeros for experts without rows.
    const bool is_dense = parameter->held == Held::kDense || parameter->held == Held::kReplicated;
    if (is_dense || parameter->grad.empty()) parameter->clear_grad();
  }
  std::vector<Real> grad_normed;
  Head<Real>{head_.value, D}.backward(normed_, grad_logits_, grad_normed, head_.grad);
  std::vector<Real> grad_x(x_.size(), 0);
  RmsNorm<Real>{norm_.value}.backward(x_, grad_normed, grad_x, norm_.grad);
  for (int64_t b = std::ssize(blocks_) - 1; b >= 0; --b) {
    Block<Real>& block = blocks_[b];
    SavedBlock& saved = saved_[b];
    const crossdock::MoeLayerGradients grads = grads_of(block, saved.moe);
    grad_normed.resize(grad_x.size());
    moe_.backward({.weights = weights_of(block),
                   .x = {saved.normed.data(), {T, D}},
                   .grad_out = {grad_x.data(), {T, D}},
                   .saved = &saved.moe,
                   .grads = grads,
                   .grad_x = {grad_normed.data(), {T, D}}});
    // grad_x, the gradient of the block's output, is also that of its input, through the residual.
    RmsNorm<Real>{block.norm.value}.backward(saved.x, grad_normed, grad_x, block.norm.grad);
  }
  Embedding<Real>{tokens.bytes, tokens.positions, D}.backward(grad_x, byte_table_.grad,
                                                              position_table_.grad);
}

template <typename Real>
crossdock::MoeLayerWeights Model<Real>::weights_of(const Block<Real>& block) const {
  return {.gate = {.weight = block.gate.view()},
          .expert_bias = {expert_bias_.data(), {config_.E}},
          .experts = {.w1 = block.w1.view(),
                      .w2 = block.w2.view(),
                      .b1 = block.b1.view(),
                      .b2 = block.b2.view()}};
}

template <typename Real>
crossdock::MoeLayerGradients Model<Real>::grads_of(Block<Real>& block,
                                                   const crossdock::MoeSaved& saved) const {
  crossdock::MoeLayerGradients grads{.gate = block.gate.grad_view(),
                                     .experts = {.w1 = block.w1.grad_view(),
                                                 .w2 = block.w2.grad_view(),
                                                 .b1 = block.b1.grad_view(),
                                                 .b2 = block.b2.grad_view()}};
  const bool skips = config_.mistake == Mistake::kSkippedEmptyExperts;
  if (skips && saved.decision.plan.num_rows() == 0) grads.experts = {};
  return grads;
}

template <typename Real>
std::vector<Parameter<Real>*> Model<Real>::parameters() {
  std::vector<Parameter<Real>*> all = {&byte_table_, &position_table_};
  for (Block<Real>& block : blocks_) {
    all.insert(all.end(), {&block.norm, &block.gate, &block.w1, &block.b1, &block.w2, &block.b2});
  }
  all.insert(all.end(), {&norm_, &head_});
  return all;
}

template <typename Real>
double Model<Real>::imbalance() const {
  const std::vector<int64_t> load = saved_.front().moe.decision.statistics.load();
  const int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
  if (total == 0) return 1.0;
  const int64_t largest = *std::max_element(load.begin(), load.end());
  return static_cast<double>(largest * std::ssize(load)) / static_cast<double>(total);
}

template class Model<float>;
template class Model<double>;

}  // namespace train
