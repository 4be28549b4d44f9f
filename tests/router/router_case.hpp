#pragma once

#include <random>
#include <string>
#include <vector>

#include "crossdock/router.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/testing/reference_router.hpp"

namespace crossdock {

inline RouterConfig small_config(Score score = Score::kSoftmax) {
  return {.num_experts = 4, .top_k = 2, .width = 4, .dtype = DType::kF64, .score = score};
}

/// Random tokens and gate for a configuration, rounded to its dtype.
inline reference::RouterInput make_router_input(const RouterConfig& config, int64_t T,
                                                uint64_t seed = 5) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](int64_t count, double scale) {
    std::vector<double> values(static_cast<size_t>(count));
    for (double& value : values) {
      value = reference::round_to(config.dtype, scale * normal(generator));
    }
    return values;
  };
  reference::RouterInput input;
  input.config = config;
  input.T = T;
  input.x = draw(T * config.width, 1.0);
  input.gate = draw(config.num_experts * config.width, 0.5);
  return input;
}

/// A reference input as tensors, and the calls of Router on them.
class RouterRun {
 public:
  explicit RouterRun(const reference::RouterInput& input,
                     std::shared_ptr<ThreadPool> pool = nullptr)
      : input_(input), config_(input.config), router_(config_, std::move(pool)) {
    const int64_t T = input.T;
    const int64_t E = config_.num_experts;
    x_ = reference::to_tensor(config_.dtype, {T, config_.width}, input.x);
    gate_ = reference::to_tensor(config_.dtype, {E, config_.width}, input.gate);
    args.x = x_.view;
    args.gate.weight = gate_.view;
    args.num_sequences = input.num_sequences;
    if (!input.gate_bias.empty()) {
      gate_bias_ = reference::to_tensor(config_.dtype, {E}, input.gate_bias);
      args.gate.bias = gate_bias_.view;
    }
    if (!input.expert_bias.empty()) {
      expert_bias_ = reference::to_tensor(sums(), {E}, input.expert_bias);
      args.expert_bias = expert_bias_.view;
    }
    if (!input.mask.empty()) args.mask = {input_.mask.data(), DType::kBool, {T}};
    if (!input.sequence_ids.empty()) args.sequence_ids = {input_.sequence_ids.data(), {T}};
    if (!input.forced_ids.empty()) args.forced_ids = {input_.forced_ids.data(), {T, config_.top_k}};
  }
  RouterRun(const RouterRun&) = delete;
  RouterRun& operator=(const RouterRun&) = delete;

  const Router& router() const { return router_; }
  DType sums() const { return config_.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  RouterOutput route() const { return router_.route(args); }

  static std::vector<int64_t> ids(const RouterOutput& output) {
    const auto values = output.routing().expert_ids.as<int32_t>();
    return {values.begin(), values.end()};
  }
  static std::vector<double> weights(const RouterOutput& output) {
    return reference::to_values(output.routing().weights);
  }

  /// All gradients, with outputs pre-filled with NaN.
  reference::RouterGradients backward(const RouterOutput& output,
                                      const std::vector<double>& grad_weights,
                                      const LossCounts& counts = {},
                                      double grad_losses = 1.0) const {
    const int64_t T = output.T;
    const int64_t E = config_.num_experts;
    const auto filled = [](DType dtype, Shape shape) {
      return reference::to_tensor(
          dtype, shape,
          std::vector<double>(static_cast<size_t>(shape.num_elements()), std::nan("")));
    };
    const OwnedTensor weights_grad = reference::to_tensor(sums(), {T, config_.top_k}, grad_weights);
    const OwnedTensor grad_x = filled(config_.dtype, {T, config_.width});
    const OwnedTensor grad_gate = filled(sums(), {E, config_.width});
    const OwnedTensor grad_bias = filled(sums(), {E});
    const OwnedTensor grad_logits = filled(sums(), {T, E});
    router_.backward({.x = args.x,
                      .gate = args.gate,
                      .output = &output,
                      .grad_weights = weights_grad.view,
                      .counts = counts,
                      .grad_losses = grad_losses,
                      .grad_x = grad_x.view,
                      .grad_gate = grad_gate.view,
                      .grad_bias = grad_bias.view,
                      .grad_logits = grad_logits.view});
    return {reference::to_values(grad_logits.view), reference::to_values(grad_x.view),
            reference::to_values(grad_gate.view), reference::to_values(grad_bias.view)};
  }

  RouteArgs args;

 private:
  reference::RouterInput input_;
  RouterConfig config_;
  Router router_;
  OwnedTensor x_, gate_, gate_bias_, expert_bias_;
};

/// Gradients of the weights that differ from route to route.
inline std::vector<double> some_grad_weights(int64_t T, int64_t K) {
  std::vector<double> grads(static_cast<size_t>(T * K));
  for (size_t i = 0; i < grads.size(); ++i) {
    grads[i] = 0.25 * static_cast<double>((i * 5 + 3) % 11) - 1.0;
  }
  return grads;
}

}  // namespace crossdock
