#include "layer/layer_on_rank.hpp"

#include <limits>
#include <utility>

namespace crossdock {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

OwnedTensor tensor(DType dtype, Shape shape, const std::vector<double>& values) {
  return reference::to_tensor(dtype, shape, values);
}

OwnedTensor filled(DType dtype, Shape shape, double value) {
  return tensor(dtype, shape,
                std::vector<double>(static_cast<size_t>(shape.num_elements()), value));
}

Shape shape_of(int member, int64_t E_local, const ExpertsConfig& config, int64_t inner) {
  const int64_t hidden = is_gated(config.activation) ? 2 * inner : inner;
  switch (member) {
    case 0:
      return {E_local, hidden, config.width};
    case 1:
      return {E_local, config.width, inner};
    case 2:
      return {E_local, hidden};
    default:
      return {E_local, config.width};
  }
}

}  // namespace

RankParameters::RankParameters(const LayerCase& layer_case, const Group& group,
                               double initial_gradient) {
  const MoeLayerConfig& config = layer_case.config;
  local_experts_ = experts_of(config, group.size(), group.rank());
  const DType dtype = layer_case.dtype();
  const DType sums = layer_case.sum_dtype();
  const int64_t E = config.router.num_experts;
  const auto E_local = static_cast<int64_t>(local_experts_.size());
  gate_ = tensor(dtype, {E, config.router.width}, layer_case.gate);
  grad_gate_ = filled(sums, gate_.view.shape, initial_gradient);
  if (!layer_case.gate_bias.empty()) {
    gate_bias_ = tensor(dtype, {E}, layer_case.gate_bias);
    grad_gate_bias_ = filled(sums, {E}, initial_gradient);
  }
  if (!layer_case.expert_bias.empty()) {
    expert_bias_ = tensor(sums, {E}, layer_case.expert_bias);
  }
  for (int m = 0; m < 4; ++m) {
    const MlpMember member = kMlpMembers[m];
    if (m < 2 || !layer_case.experts[0].b1.empty()) {
      std::vector<double> all;
      for (const int64_t e : local_experts_) {
        const reference::MlpWeights& whole = layer_case.experts[static_cast<size_t>(e)];
        const std::vector<double> values = shard_of(config, whole, group.rank()).*member;
        all.insert(all.end(), values.begin(), values.end());
      }
      const bool has_more = group.rank() % config.etp < config.experts.inner % config.etp;
      const int64_t inner = config.experts.inner / config.etp + (has_more ? 1 : 0);
      const Shape shape = shape_of(m, E_local, config.experts, inner);
      experts_[m] = tensor(dtype, shape, all);
      grad_experts_[m] = filled(sums, shape, initial_gradient);
    }
    if (!(layer_case.shared.*member).empty()) {
      const Shape shape = shape_of(m, 1, config.experts, config.shared_inner);
      shared_[m] = tensor(dtype, shape, layer_case.shared.*member);
      grad_shared_[m] = filled(sums, shape, initial_gradient);
    }
  }
}

MoeLayerWeights RankParameters::weights() const {
  return {.gate = {gate_.view, gate_bias_.view},
          .expert_bias = expert_bias_.view,
          .experts = {experts_[0].view, experts_[1].view, experts_[2].view, experts_[3].view},
          .shared = {shared_[0].view, shared_[1].view, shared_[2].view, shared_[3].view}};
}

MoeLayerGradients RankParameters::grads() const {
  return {.gate = grad_gate_.view,
          .gate_bias = grad_gate_bias_.view,
          .experts = {grad_experts_[0].view, grad_experts_[1].view, grad_experts_[2].view,
                      grad_experts_[3].view},
          .shared = {grad_shared_[0].view, grad_shared_[1].view, grad_shared_[2].view,
                     grad_shared_[3].view}};
}

void RankParameters::read_gradients(const LayerCase& layer_case, RankResult& result) const {
  result.grad_gate = reference::to_values(grad_gate_.view);
  if (grad_gate_bias_.view.given()) {
    result.grad_gate_bias = reference::to_values(grad_gate_bias_.view);
  }
  result.experts.assign(layer_case.experts.size(), {});
  for (int m = 0; m < 4; ++m) {
    const MlpMember member = kMlpMembers[m];
    if (grad_experts_[m].view.given()) {
      const std::vector<double> all = reference::to_values(grad_experts_[m].view);
      const int64_t size =
          local_experts_.empty() ? 0 : std::ssize(all) / std::ssize(local_experts_);
      for (size_t i = 0; i < local_experts_.size(); ++i) {
        const auto begin = all.begin() + static_cast<int64_t>(i) * size;
        (result.experts[static_cast<size_t>(local_experts_[i])].*member)
            .assign(begin, begin + size);
      }
    }
    if (grad_shared_[m].view.given()) {
      result.shared.*member = reference::to_values(grad_shared_[m].view);
    }
  }
}

void RankParameters::move(const MoveTensor& move) {
  std::vector<OwnedTensor*> all = {&gate_, &gate_bias_, &expert_bias_, &grad_gate_,
                                   &grad_gate_bias_};
  for (auto* members : {&experts_, &grad_experts_, &shared_, &grad_shared_}) {
    for (OwnedTensor& member : *members) all.push_back(&member);
  }
  for (OwnedTensor* tensor : all) {
    if (tensor->view.given()) *tensor = move(*tensor);
  }
}

void RankTokens::move(const MoveTensor& move) {
  for (OwnedTensor* tensor : {&x, &grad_out, &mask, &forced_ids}) {
    if (tensor->view.given()) *tensor = move(*tensor);
  }
}

RankTokens::RankTokens(const LayerCase& layer_case, int rank) {
  const int64_t D = layer_case.config.router.width;
  const int64_t T = layer_case.tokens_per_rank[static_cast<size_t>(rank)];
  x = tensor(layer_case.dtype(), {T, D}, part_of(layer_case, rank, layer_case.x, D));
  grad_out = tensor(layer_case.dtype(), {T, D}, part_of(layer_case, rank, layer_case.grad_out, D));
  if (!layer_case.mask.empty()) {
    const std::vector<uint8_t> own = part_of(layer_case, rank, layer_case.mask, 1);
    mask = tensor(DType::kBool, {T}, {own.begin(), own.end()});
  }
  if (layer_case.forced_ids.empty()) return;
  const int64_t K = layer_case.config.router.top_k;
  const std::vector<int64_t> ids = part_of(layer_case, rank, layer_case.forced_ids, K);
  forced_ids = tensor(DType::kI64, {T, K}, {ids.begin(), ids.end()});
}

LayerOnRank::LayerOnRank(Group& group, const LayerCase& layer_case_in, MoeLayerOptions options,
                         double initial_gradient, std::optional<int> token_rank)
    : layer_case(layer_case_in),
      layer(group, layer_case.config, std::move(options)),
      parameters(layer_case, group, initial_gradient),
      tokens(layer_case, token_rank.value_or(group.rank())) {}

MoeForwardArgs LayerOnRank::forward_args() const {
  return {.weights = parameters.weights(),
          .x = tokens.x.view,
          .mask = tokens.mask.view,
          .forced_ids = tokens.forced_ids.view};
}

MoeBackwardArgs LayerOnRank::backward_args(MoeSaved& saved) const {
  return {.weights = parameters.weights(),
          .x = tokens.x.view,
          .grad_out = tokens.grad_out.view,
          .saved = &saved,
          .grads = parameters.grads()};
}

RankResult LayerOnRank::result(const MoeForwardResult& forward_result,
                               const OwnedTensor& grad_x) const {
  RankResult result;
  result.out = reference::to_values(forward_result.out.view);
  result.grad_x = reference::to_values(grad_x.view);
  result.losses = forward_result.saved.decision.losses;
  result.load = forward_result.saved.decision.load;
  parameters.read_gradients(layer_case, result);
  return result;
}

RankResult run_layer(Group& group, const LayerCase& layer_case, MoeLayerOptions options) {
  LayerOnRank rank(group, layer_case, std::move(options), kNaN);
  MoeForwardResult forward = rank.forward();
  const OwnedTensor grad_x = rank.backward(forward.saved);
  return rank.result(forward, grad_x);
}

std::vector<RankResult> run_layer_on_threads(const LayerCase& layer_case, ThreadOptions options) {
  std::vector<RankResult> results(layer_case.tokens_per_rank.size());
  run_ranks(
      layer_case.num_ranks(),
      [&](Group& group) {
        results[static_cast<size_t>(group.rank())] = run_layer(group, layer_case);
      },
      options);
  return results;
}

}  // namespace crossdock
