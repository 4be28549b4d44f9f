#include <algorithm>
#include <limits>
#include <map>
#include <memory>

#include "core/check.hpp"
#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
namespace {

using reference::MlpWeights;
using Values = std::vector<double>;

// Matrices of this shape, [n, rows, columns], as [n, columns, rows].
Values transposed(const Values& values, const Shape& shape) {
  const auto rows = static_cast<size_t>(shape[1]);
  const auto columns = static_cast<size_t>(shape[2]);
  Values result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t matrix = i - i % (rows * columns);
    const size_t row = i % (rows * columns) / columns;
    result[matrix + i % columns * rows + row] = values[i];
  }
  return result;
}

/// The tensors of one rank in its place; those that are not given are not set.
class RankTensors {
 public:
  RankTensors(const LayerSpec& spec, const TensorPlace& place) : spec_(spec), place_(place) {}

  TensorView put(DType dtype, const Shape& shape, const Values& values) {
    OwnedTensor host = reference::to_tensor(dtype, shape, values);
    owned_.push_back(place_.to_device ? place_.to_device(host.view) : std::move(host));
    return owned_.back().view;
  }
  template <typename T>
  TensorView put_if_any(DType dtype, const Shape& shape, const std::vector<T>& values) {
    return values.empty() ? TensorView() : put(dtype, shape, {values.begin(), values.end()});
  }
  // An output, poisoned so that values that are not written are detected.
  TensorView output(DType dtype, const Shape& shape, double initial) {
    return put(dtype, shape, Values(static_cast<size_t>(shape.num_elements()), initial));
  }
  TensorView gradient(const Shape& shape) {
    return output(spec_.sum_dtype(), shape, spec_.accumulate ? kInitialGradient : kPoison);
  }
  Values read(const ConstTensorView& tensor) const {
    if (!tensor.given()) return {};
    return place_.to_host ? reference::to_values(place_.to_host(tensor))
                          : reference::to_values(tensor);
  }
  MlpWeights read(const ExpertGradients& mlp) const {
    return {.w1 = read_weight(mlp.w1),
            .w2 = read_weight(mlp.w2),
            .b1 = read(mlp.b1),
            .b2 = read(mlp.b2)};
  }

  static constexpr double kPoison = std::numeric_limits<double>::quiet_NaN();

 private:
  // Those of experts are read as if they were not transposed.
  Values read_weight(const ConstTensorView& weight) const {
    const Values values = read(weight);
    return spec_.config.experts.transposed && weight.given() ? transposed(values, weight.shape)
                                                             : values;
  }

  const LayerSpec& spec_;
  const TensorPlace& place_;
  std::vector<OwnedTensor> owned_;
};

struct Parameters {
  MoeLayerWeights weights;
  MoeLayerGradients grads;
};

// `all` has `count` MLPs of this width, one after the other.
void put_mlp(const LayerSpec& spec, const MlpWeights& all, bool b1, bool b2, const Shape& w2_shape,
             RankTensors& tensors, ExpertWeights& mlp, ExpertGradients& grads) {
  const int64_t count = w2_shape[0];
  const int64_t D = w2_shape[1];
  const int64_t hidden = is_gated(spec.config.experts.activation) ? 2 * w2_shape[2] : w2_shape[2];
  const auto put = [&](const Shape& shape, const Values& values, ConstTensorView& weight,
                       TensorView& grad) {
    weight = tensors.put(spec.dtype(), shape, values);
    grad = tensors.gradient(shape);
  };
  const auto put_weight = [&](const Shape& shape, const Values& values, ConstTensorView& weight,
                              TensorView& grad) {
    if (!spec.config.experts.transposed) return put(shape, values, weight, grad);
    put({shape[0], shape[2], shape[1]}, transposed(values, shape), weight, grad);
  };
  put_weight({count, hidden, D}, all.w1, mlp.w1, grads.w1);
  put_weight(w2_shape, all.w2, mlp.w2, grads.w2);
  if (b1) put({count, hidden}, all.b1, mlp.b1, grads.b1);
  if (b2) put({count, D}, all.b2, mlp.b2, grads.b2);
}

Parameters put_parameters(const LayerWorld& world, int rank, RankTensors& tensors) {
  const LayerSpec& spec = world.spec;
  const MoeLayerConfig& config = spec.config;
  const int64_t E = config.router.num_experts;
  const int64_t D = config.router.width;
  Parameters made;
  made.weights.gate.weight = tensors.put(spec.gate_dtype, {E, D}, world.gate);
  made.weights.gate.bias = tensors.put_if_any(spec.gate_dtype, {E}, world.gate_bias);
  made.weights.expert_bias = tensors.put_if_any(spec.sum_dtype(), {E}, world.expert_bias);
  if (!spec.skip_gate_gradients) {
    made.grads.gate = tensors.gradient({E, D});
    if (!world.gate_bias.empty()) made.grads.gate_bias = tensors.gradient({E});
  }
  const std::vector<int64_t> experts = experts_of(spec, rank);
  const std::vector<int> members = members_of(spec.layer_groups, spec.num_ranks(), rank);
  const int64_t shard = (std::ranges::find(members, rank) - members.begin()) % config.etp;
  const int64_t inner =
      config.experts.inner / config.etp + (shard < config.experts.inner % config.etp ? 1 : 0);
  MlpWeights local;
  for (const int64_t e : experts) {
    const MlpWeights part =
        reference::shard_of(mlp_of(spec, config.experts.inner),
                            world.experts[static_cast<size_t>(e)], config.etp, shard);
    for (const auto member : {&MlpWeights::w1, &MlpWeights::w2, &MlpWeights::b1, &MlpWeights::b2}) {
      (local.*member).insert((local.*member).end(), (part.*member).begin(), (part.*member).end());
    }
  }
  const MlpWeights& any = world.experts[0];
  put_mlp(spec, local, !any.b1.empty(), !any.b2.empty(), {std::ssize(experts), D, inner}, tensors,
          made.weights.experts, made.grads.experts);
  if (spec.skip_expert_gradients) made.grads.experts.w1 = made.grads.experts.b1 = {};
  if (config.shared_inner == 0) return made;
  put_mlp(spec, world.shared, !world.shared.b1.empty(), !world.shared.b2.empty(),
          {1, D, config.shared_inner}, tensors, made.weights.shared, made.grads.shared);
  if (spec.skip_shared_gradients) made.grads.shared = {};
  return made;
}

// [T, ...], or [1, T, ...]
Shape token_shape(const LayerSpec& spec, int64_t T, int64_t width = 0) {
  if (!spec.with_batch) return width > 0 ? Shape{T, width} : Shape{T};
  return width > 0 ? Shape{1, T, width} : Shape{1, T};
}

MoeForwardArgs put_tokens(const LayerSpec& spec, const LayerTokens& tokens, RankTensors& into) {
  const auto shape = [&](int64_t width = 0) { return token_shape(spec, tokens.T, width); };
  MoeForwardArgs args;
  args.x = into.put(spec.dtype(), shape(spec.config.router.width), tokens.x);
  args.mask = into.put_if_any(DType::kBool, shape(), tokens.mask);
  args.sequence_ids = into.put_if_any(DType::kI32, shape(), tokens.sequence_ids);
  args.forced_ids = into.put_if_any(spec.wide_ids ? DType::kI64 : DType::kI32,
                                    shape(spec.config.router.top_k), tokens.forced_ids);
  if (spec.token_ids) {  // also without tokens
    const Values ids(tokens.token_ids.begin(), tokens.token_ids.end());
    args.token_ids = into.put(DType::kI64, shape(), ids);
  }
  args.num_sequences = tokens.num_sequences;
  args.total_sequences = spec.total_sequences;
  args.jitter_seed = spec.jitter_seed;
  return args;
}

/// The groups of one rank. Equal sets of ranks are one group.
class RankGroups {
 public:
  explicit RankGroups(Group& world) : world_(world) {}

  /// Collective within the group. Null: `groups` is empty.
  Group* of(const std::vector<int64_t>& groups) {
    if (groups.empty()) return nullptr;
    const std::vector<int> members = members_of(groups, world_.size(), world_.rank());
    if (std::ssize(members) == world_.size()) return &world_;
    std::unique_ptr<Group>& group = made_[members];
    if (!group) group = world_.subgroup(members);
    return group.get();
  }

 private:
  Group& world_;
  std::map<std::vector<int>, std::unique_ptr<Group>> made_;
};

bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && reference::compare(a, b).num_different == 0;
}

// A second forward with the decision of the first must have the same bits.
MoeForwardResult repeat(MoeLayer& layer, MoeForwardArgs args, const MoeForwardResult& first,
                        const RankTensors& tensors) {
  const Values before = tensors.read(first.out.view);
  args.decision = &first.saved.decision;
  args.earlier = nullptr;
  args.out = {};
  MoeForwardResult second = layer.forward(args);
  CROSSDOCK_CHECK(same_bits(before, tensors.read(second.out.view)),
                  "a forward with the decision of an earlier one has other bits");
  return second;
}

OwnedTensor run_backward(MoeLayer& layer, const LayerSpec& spec, MoeBackwardArgs args) {
  args.accumulate = spec.accumulate;
  args.delay_dw = spec.delay_dw;
  args.grad_losses = spec.grad_losses;
  OwnedTensor grad_x = layer.backward(args);
  if (spec.delay_dw) {
    layer.backward_dw({.x = args.x,
                       .grad_out = args.grad_out,
                       .saved = args.saved,
                       .experts = args.grads.experts,
                       .shared = args.grads.shared,
                       .accumulate = spec.accumulate});
  }
  return grad_x;
}

}  // namespace

LayerResults run_layer(Group& group, MoeLayerOptions options, const LayerWorld& world,
                       const TensorPlace& place) {
  const LayerSpec& spec = world.spec;
  const LayerTokens& own = world.ranks[static_cast<size_t>(group.rank())];
  RankTensors tensors(spec, place);
  const Parameters parameters = put_parameters(world, group.rank(), tensors);
  RankGroups groups(group);
  Group* layers_group = groups.of(spec.layer_groups);
  options.counting_group = groups.of(spec.counting_groups);
  options.sequence_group = groups.of(spec.sequence_groups);
  options.replicated_over = groups.of(spec.replicated_over);
  options.device.stream = place.stream;
  MoeLayer layer(layers_group != nullptr ? *layers_group : group, spec.config, std::move(options));
  const Shape shape = token_shape(spec, own.T, spec.config.router.width);

  MoeForwardResult earlier;
  MoeForwardArgs args = put_tokens(spec, own, tensors);
  args.weights = parameters.weights;
  if (!world.earlier.empty()) {
    MoeForwardArgs first =
        put_tokens(spec, world.earlier[static_cast<size_t>(group.rank())], tensors);
    first.weights = parameters.weights;
    earlier = layer.forward(first);
    args.earlier = &earlier.saved.decision.statistics;
  }
  if (spec.given_outputs) args.out = tensors.output(spec.dtype(), shape, RankTensors::kPoison);
  MoeForwardResult forward = layer.forward(args);
  if (spec.reuse_decision) forward = repeat(layer, args, forward, tensors);

  MoeBackwardArgs back{.weights = parameters.weights,
                       .x = args.x,
                       .grad_out = tensors.put(spec.dtype(), shape, own.grad_out),
                       .saved = &forward.saved,
                       .grads = parameters.grads};
  if (spec.given_outputs) back.grad_x = tensors.output(spec.dtype(), shape, RankTensors::kPoison);
  const OwnedTensor grad_x = run_backward(layer, spec, back);
  const MoeDecision decision = forward.saved.decision.on_host(place.stream);
  const RouterLosses& losses = decision.losses;
  const bool by_sequence = spec.config.router.counts(BalanceScope::kSequence);
  return {.out = tensors.read(forward.out.view),
          .grad_x = tensors.read(grad_x.view),
          .grad_gate = tensors.read(parameters.grads.gate),
          .grad_gate_bias = tensors.read(parameters.grads.gate_bias),
          .grad_experts = tensors.read(parameters.grads.experts),
          .grad_shared = tensors.read(parameters.grads.shared),
          .load = {decision.load.begin(), decision.load.end()},
          .dropped = {decision.dropped.begin(), decision.dropped.end()},
          .losses = {losses.aux, losses.z, losses.aux_terms.batch, losses.aux_terms.sequence,
                     losses.aux_terms.global_batch},
          .totals = {static_cast<double>(decision.total_tokens),
                     by_sequence ? decision.total_sequences : 0.0}};
}

}  // namespace crossdock::conformance
