#include "cli/verify/layer_checks.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "cli/device/rank_device.hpp"
#include "cli/numerics/epsilon.hpp"
#include "cli/verify/layer_world.hpp"

namespace crossdock::cli {
namespace {

using conformance::Check;
using conformance::Findings;
using reference::MlpWeights;
using Values = std::vector<double>;

/// Parameters and gradients of one rank on its device; unset ones are not given.
class LayerTensors {
 public:
  LayerTensors(const LayerWorld& world, int rank, RankDevice& device)
      : world_(world), device_(device), dtype_(world.dtype()) {
    const RouterConfig& router = world.config.router;
    const reference::RouterInput& own = world.ranks[static_cast<size_t>(rank)];
    const Shape tokens{own.T, router.width};
    x = put(dtype_, tokens, own.x);
    grad_out = put(dtype_, tokens, world.grad_out[static_cast<size_t>(rank)]);
    if (!own.mask.empty()) {
      mask = put(DType::kBool, {own.T}, {own.mask.begin(), own.mask.end()});
    }
    if (!own.forced_ids.empty()) {
      forced_ids =
          put(DType::kI64, {own.T, router.top_k}, {own.forced_ids.begin(), own.forced_ids.end()});
    }
    weights.gate.weight = put(dtype_, {router.num_experts, router.width}, own.gate);
    grads.gate = make_gradient(weights.gate.weight.shape);
    if (!own.gate_bias.empty()) {
      weights.gate.bias = put(dtype_, {router.num_experts}, own.gate_bias);
      grads.gate_bias = make_gradient({router.num_experts});
    }
    MlpWeights local;
    const int64_t first = world.first_expert(rank);
    const int64_t end = world.first_expert(rank + 1);
    for (int64_t e = first; e < end; ++e) append(world.experts[static_cast<size_t>(e)], local);
    const bool has_biases = !world.experts[0].b1.empty();
    put_mlp(local, end - first, world.config.experts.inner, has_biases, weights.experts,
            grads.experts);
    if (const int64_t inner = world.config.shared_inner; inner > 0) {
      put_mlp(world.shared, 1, inner, has_biases, weights.shared, grads.shared);
    }
  }

  Values read(const TensorView& tensor) const {
    if (!tensor.given()) return {};
    return reference::to_values(device_.to_host(tensor));
  }
  MlpWeights read(const ExpertGradients& mlp) const {
    return {.w1 = read(mlp.w1), .w2 = read(mlp.w2), .b1 = read(mlp.b1), .b2 = read(mlp.b2)};
  }

  TensorView x, grad_out, mask, forced_ids;
  MoeLayerWeights weights;
  MoeLayerGradients grads;

 private:
  static void append(const MlpWeights& one, MlpWeights& all) {
    for (const auto member : {&MlpWeights::w1, &MlpWeights::w2, &MlpWeights::b1, &MlpWeights::b2}) {
      (all.*member).insert((all.*member).end(), (one.*member).begin(), (one.*member).end());
    }
  }
  TensorView put(DType dtype, const Shape& shape, const Values& values) {
    const OwnedTensor host = reference::to_tensor(dtype, shape, values);
    return owned_.emplace_back(device_.to_device(host.view)).view;
  }
  // Poisoned, so that a gradient that is not written is detected.
  TensorView make_gradient(const Shape& shape) {
    const Values poison(static_cast<size_t>(shape.num_elements()),
                        std::numeric_limits<double>::quiet_NaN());
    return put(world_.sum_dtype(), shape, poison);
  }
  void put_mlp(const MlpWeights& values, int64_t count, int64_t inner, bool has_biases,
               ExpertWeights& mlp, ExpertGradients& gradients) {
    const int64_t D = world_.config.router.width;
    const int64_t hidden = is_gated(world_.config.experts.activation) ? 2 * inner : inner;
    mlp.w1 = put(dtype_, {count, hidden, D}, values.w1);
    mlp.w2 = put(dtype_, {count, D, inner}, values.w2);
    gradients.w1 = make_gradient({count, hidden, D});
    gradients.w2 = make_gradient({count, D, inner});
    if (!has_biases) return;
    mlp.b1 = put(dtype_, {count, hidden}, values.b1);
    mlp.b2 = put(dtype_, {count, D}, values.b2);
    gradients.b1 = make_gradient({count, hidden});
    gradients.b2 = make_gradient({count, D});
  }

  const LayerWorld& world_;
  RankDevice& device_;
  DType dtype_;
  std::vector<OwnedTensor> owned_;
};

LayerResults run_layer(Group& group, const StrategyFactory& strategy, const LayerWorld& world,
                       RankDevice& device) {
  const LayerTensors tensors(world, group.rank(), device);
  MoeLayer layer(group, world.config,
                 {.strategy = strategy(), .device = {.stream = device.stream()}});
  MoeForwardResult forward = layer.forward({.weights = tensors.weights,
                                            .x = tensors.x,
                                            .mask = tensors.mask,
                                            .forced_ids = tensors.forced_ids});
  const OwnedTensor grad_x = layer.backward({.weights = tensors.weights,
                                             .x = tensors.x,
                                             .grad_out = tensors.grad_out,
                                             .saved = &forward.saved,
                                             .grads = tensors.grads});
  const MoeDecision decision = forward.saved.decision.on_host(device.stream());
  return {.out = tensors.read(forward.out.view),
          .grad_x = tensors.read(grad_x.view),
          .grad_gate = tensors.read(tensors.grads.gate),
          .grad_gate_bias = tensors.read(tensors.grads.gate_bias),
          .grad_experts = tensors.read(tensors.grads.experts),
          .grad_shared = tensors.read(tensors.grads.shared),
          .load = {decision.load.begin(), decision.load.end()},
          .losses = {decision.losses.aux, decision.losses.z}};
}

// Sums are computed in fp32 (fp64 for fp64); results and hidden rows are rounded to the dtype.
double tolerance_of(const LayerWorld& world) {
  const auto terms = static_cast<double>(world.config.router.width + world.config.experts.inner);
  return 8.0 * epsilon_of(world.dtype()) + 16.0 * std::sqrt(terms) * epsilon_of(world.sum_dtype());
}

class Comparison {
 public:
  Comparison(int rank, double tolerance) : rank_(rank), tolerance_(tolerance) {}

  // Values of tokens and parameters are near 1, so terms that cancel are, too.
  void compare(const std::string& name, const Values& got, const Values& wanted) {
    std::ostringstream message;
    message.precision(9);
    message << "rank " << rank_ << ": " << name;
    if (got.size() != wanted.size()) {
      message << " has " << got.size() << " values, must have " << wanted.size();
      return findings_.push_back(message.str());
    }
    double scale = 1.0;
    for (const double value : wanted) scale = std::max(scale, std::abs(value));
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (std::abs(got[i] - wanted[i]) <= tolerance_ * scale) continue;  // not if got is NaN
      message << ", value " << i << " is " << got[i] << ", must be " << wanted[i];
      return findings_.push_back(message.str());
    }
  }
  void compare(const std::string& name, const MlpWeights& got, const MlpWeights& wanted) {
    compare(name + " w1", got.w1, wanted.w1);
    compare(name + " w2", got.w2, wanted.w2);
    compare(name + " b1", got.b1, wanted.b1);
    compare(name + " b2", got.b2, wanted.b2);
  }
  Findings take() { return std::move(findings_); }

 private:
  int rank_;
  double tolerance_;
  Findings findings_;
};

Findings judge_layer(Group& group, const StrategyFactory& strategy, const LayerWorld& world,
                     const std::string& device_name) {
  const std::unique_ptr<RankDevice> device = make_rank_device(device_name, group);
  const LayerResults got = run_layer(group, strategy, world, *device);
  const LayerResults wanted = expected_results(world, group.rank());
  Comparison comparison(group.rank(), tolerance_of(world));
  comparison.compare("out", got.out, wanted.out);
  comparison.compare("grad_x", got.grad_x, wanted.grad_x);
  comparison.compare("grad of the gate", got.grad_gate, wanted.grad_gate);
  comparison.compare("grad of the gate's bias", got.grad_gate_bias, wanted.grad_gate_bias);
  comparison.compare("grad of the experts'", got.grad_experts, wanted.grad_experts);
  comparison.compare("grad of the shared experts'", got.grad_shared, wanted.grad_shared);
  comparison.compare("load", got.load, wanted.load);
  comparison.compare("losses", got.losses, wanted.losses);
  return comparison.take();
}

}  // namespace

std::vector<Check> list_layer_checks(const std::string& device) {
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16, DType::kF16};
  if (device == "cpu") dtypes.push_back(DType::kF64);
  std::vector<Check> checks;
  for (size_t routing = 0; routing < kLayerRoutingNames.size(); ++routing) {
    for (size_t i = 0; i < dtypes.size(); ++i) {
      const auto make = [=, dtype = dtypes[i]](int num_ranks) {
        return make_layer_world(static_cast<LayerRouting>(routing), dtype, num_ranks);
      };
      std::string name = "layer";
      for (const std::string_view part : {kLayerRoutingNames[routing], name_of(dtypes[i]),
                                          name_of(make(1).config.experts.activation)}) {
        name.append("/").append(part);
      }
      checks.push_back({name, routing % 3 == i, [=](Group& group, const StrategyFactory& strategy) {
                          return judge_layer(group, strategy, make(group.size()), device);
                        }});
    }
  }
  return checks;
}

}  // namespace crossdock::cli
