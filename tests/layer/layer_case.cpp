#include "layer/layer_case.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <sstream>

#include "support/message_of.hpp"

namespace crossdock {
namespace {

using reference::MlpWeights;

class Values {
 public:
  explicit Values(DType dtype) : dtype_(dtype) {}
  std::vector<double> draw(int64_t count, double scale) {
    std::vector<double> values(static_cast<size_t>(count));
    for (double& value : values) value = reference::round_to(dtype_, scale * normal_(generator_));
    return values;
  }
  MlpWeights draw_mlp(const ExpertsConfig& config, int64_t inner, bool biases) {
    const int64_t hidden = is_gated(config.activation) ? 2 * inner : inner;
    const double scale = 1.0 / std::sqrt(static_cast<double>(config.width));
    MlpWeights mlp;
    mlp.w1 = draw(hidden * config.width, scale);
    mlp.w2 = draw(config.width * inner, scale);
    if (!biases) return mlp;
    mlp.b1 = draw(hidden, 0.5);
    mlp.b2 = draw(config.width, 0.5);
    return mlp;
  }

 private:
  DType dtype_;
  std::mt19937_64 generator_{11};
  std::normal_distribution<double> normal_;
};

void add(const std::vector<double>& term, std::vector<double>& sum) {
  for (size_t i = 0; i < term.size(); ++i) sum[i] += term[i];
}

}  // namespace

int64_t first_token(const LayerCase& layer_case, int rank) {
  int64_t first = 0;
  for (int r = 0; r < rank; ++r) first += layer_case.tokens_per_rank[static_cast<size_t>(r)];
  return first;
}

reference::MlpConfig LayerCase::mlp(int64_t inner) const {
  return {config.router.width, inner, config.experts.activation, config.experts.interleaved,
          config.experts.limit};
}

MlpWeights shard_of(const MoeLayerConfig& config, const MlpWeights& whole, int rank) {
  const reference::MlpConfig mlp{config.router.width, config.experts.inner,
                                 config.experts.activation, config.experts.interleaved,
                                 config.experts.limit};
  return reference::shard_of(mlp, whole, config.etp, rank % config.etp);
}

std::vector<int64_t> experts_of(const MoeLayerConfig& config, int num_ranks, int rank) {
  const int etp = static_cast<int>(config.etp);
  const std::vector<int32_t> owners = reference::owners_of(config.dispatch, num_ranks / etp);
  std::vector<int64_t> experts;
  for (size_t e = 0; e < owners.size(); ++e) {
    if (owners[e] == rank / etp) experts.push_back(static_cast<int64_t>(e));
  }
  return experts;
}

LayerCase make_case(const LayerCaseOptions& options) {
  LayerCase result;
  result.config = options.config;
  MoeLayerConfig& config = result.config;
  config.experts.width = config.router.width;
  config.router.dtype = config.experts.dtype;
  config.dispatch.num_experts = config.router.num_experts;
  config.dispatch.top_k = config.router.top_k;
  config.dispatch.width = config.router.width;
  result.tokens_per_rank = options.tokens_per_rank;
  const int64_t T = first_token(result, result.num_ranks());
  const int64_t D = config.router.width;
  const int64_t E = config.router.num_experts;
  Values values(config.experts.dtype);
  result.x = values.draw(T * D, 1.0);
  result.grad_out = values.draw(T * D, 1.0);
  result.gate = values.draw(E * D, 1.0);
  if (options.biases) result.gate_bias = values.draw(E, 0.5);
  if (options.expert_bias) result.expert_bias = values.draw(E, 0.5);
  for (int64_t e = 0; e < E; ++e) {
    result.experts.push_back(values.draw_mlp(config.experts, config.experts.inner, options.biases));
  }
  if (config.shared_inner > 0) {
    result.shared = values.draw_mlp(config.experts, config.shared_inner, options.biases);
  }
  for (int64_t t = 0; options.mask && t < T; ++t) result.mask.push_back(t % 3 == 1 ? 1 : 0);
  return result;
}

LayerCase spread(LayerCase layer_case, std::vector<int64_t> tokens_per_rank) {
  layer_case.tokens_per_rank = std::move(tokens_per_rank);
  return layer_case;
}

reference::RouterInput router_input(const LayerCase& layer_case, int rank) {
  return {.config = layer_case.config.router,
          .T = layer_case.tokens_per_rank[static_cast<size_t>(rank)],
          .x = part_of(layer_case, rank, layer_case.x, layer_case.config.router.width),
          .gate = layer_case.gate,
          .gate_bias = layer_case.gate_bias,
          .expert_bias = layer_case.expert_bias,
          .mask = part_of(layer_case, rank, layer_case.mask, 1),
          .sequence_ids = {},
          .num_sequences = 1,
          .forced_ids =
              part_of(layer_case, rank, layer_case.forced_ids, layer_case.config.router.top_k)};
}

std::vector<RankResult> run_reference(const LayerCase& layer_case) {
  const MoeLayerConfig& config = layer_case.config;
  const int64_t D = config.router.width;
  std::vector<reference::RouterResult> routes;
  reference::LayerInput input{
      .config = config.dispatch,
      .ranks = {},
      .weights_in_experts = config.experts.weights_in == WeightsIn::kExperts,
      .mlp = layer_case.mlp(config.experts.inner),
      .experts = layer_case.experts};
  reference::RouterCounts counts{
      .routes_per_expert = std::vector<int64_t>(static_cast<size_t>(config.router.num_experts)),
      .num_tokens = {0}};
  for (int rank = 0; rank < layer_case.num_ranks(); ++rank) {
    const reference::RouterInput router = router_input(layer_case, rank);
    routes.push_back(reference::route(router));
    input.ranks.push_back({.T = router.T,
                           .x = router.x,
                           .expert_ids = routes.back().expert_ids,
                           .weights = routes.back().weights,
                           .grad_out = part_of(layer_case, rank, layer_case.grad_out, D),
                           .mask = router.mask});
    const reference::RouterCounts& own = routes.back().counts;
    for (size_t e = 0; e < counts.routes_per_expert.size(); ++e) {
      counts.routes_per_expert[e] += own.routes_per_expert[e];
    }
    counts.num_tokens[0] += own.num_tokens[0];
  }
  const reference::LayerOutput layer = reference::run_layer(input);

  std::vector<RankResult> results;
  for (int rank = 0; rank < layer_case.num_ranks(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    const reference::RouterInput router = router_input(layer_case, rank);
    const reference::RouterGradients back =
        reference::route_backward(router, routes[r], layer.grad_weights[r], counts);
    const reference::RouterLossValues losses = reference::router_losses(router, routes[r], counts);
    RankResult result;
    result.out = layer.out[r];
    result.grad_x = layer.grad_x[r];
    result.grad_gate = back.gate;
    if (!layer_case.gate_bias.empty()) result.grad_gate_bias = back.gate_bias;
    result.experts.resize(layer_case.experts.size());
    result.losses.aux = losses.aux;
    result.losses.z = losses.z;
    result.load = counts.routes_per_expert;
    add(back.x, result.grad_x);
    for (const int64_t e : experts_of(config, layer_case.num_ranks(), rank)) {
      result.experts[static_cast<size_t>(e)] =
          shard_of(config, layer.expert_grads[static_cast<size_t>(e)], rank);
    }
    if (config.shared_inner > 0) {
      const reference::MlpConfig mlp = layer_case.mlp(config.shared_inner);
      add(reference::mlp_forward(mlp, layer_case.shared, router.x), result.out);
      const reference::MlpGradients grads =
          reference::mlp_backward(mlp, layer_case.shared, router.x, {}, input.ranks[r].grad_out);
      add(grads.rows, result.grad_x);
      result.shared = grads.expert;
    }
    results.push_back(std::move(result));
  }
  return results;
}

namespace {

class Differences {
 public:
  explicit Differences(double tolerance) : tolerance_(tolerance) {}
  void compare(const std::string& name, const std::vector<double>& got,
               const std::vector<double>& wanted) {
    if (got.size() != wanted.size()) {
      text_ << name << " has " << got.size() << " values, must have " << wanted.size() << "\n";
      return;
    }
    double scale = 1.0;
    for (const double value : wanted) scale = std::max(scale, std::abs(value));
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::abs(got[i] - wanted[i]) <= tolerance_ * scale) continue;
      text_ << name << "[" << i << "] is " << got[i] << ", must be " << wanted[i] << "\n";
      return;
    }
  }
  std::string text() const { return text_.str(); }

 private:
  double tolerance_;
  std::ostringstream text_;
};

}  // namespace

std::string find_difference(const RankResult& got, const RankResult& wanted, double tolerance) {
  Differences differences(tolerance);
  differences.compare("out", got.out, wanted.out);
  differences.compare("grad_x", got.grad_x, wanted.grad_x);
  differences.compare("grad of gate", got.grad_gate, wanted.grad_gate);
  differences.compare("grad of gate_bias", got.grad_gate_bias, wanted.grad_gate_bias);
  const char* names[] = {"w1", "w2", "b1", "b2"};
  for (int m = 0; m < 4; ++m) {
    for (size_t e = 0; e < wanted.experts.size(); ++e) {
      differences.compare("grad of " + std::string(names[m]) + " of expert " + std::to_string(e),
                          got.experts[e].*kMlpMembers[m], wanted.experts[e].*kMlpMembers[m]);
    }
    differences.compare("grad of shared " + std::string(names[m]), got.shared.*kMlpMembers[m],
                        wanted.shared.*kMlpMembers[m]);
  }
  differences.compare("losses", {got.losses.aux, got.losses.z},
                      {wanted.losses.aux, wanted.losses.z});
  differences.compare("load", {got.load.begin(), got.load.end()},
                      {wanted.load.begin(), wanted.load.end()});
  return differences.text();
}

void expect_refused(const Group& group, const std::string& words,
                    const std::function<void()>& call) {
  EXPECT_THAT(message_of(call), ::testing::HasSubstr(words)) << "rank " << group.rank();
  EXPECT_FALSE(group.is_poisoned()) << "rank " << group.rank();
}

std::vector<double> shared_bits(const std::vector<RankResult>& ranks) {
  std::vector<double> all;
  const auto append = [&](const std::vector<double>& values) {
    all.insert(all.end(), values.begin(), values.end());
  };
  for (const RankResult& rank : ranks) append(rank.out);
  for (const RankResult& rank : ranks) append(rank.grad_x);
  for (size_t e = 0; e < ranks[0].experts.size(); ++e) {
    for (const RankResult& rank : ranks) {
      for (const MlpMember member : kMlpMembers) append(rank.experts[e].*member);
    }
  }
  return all;
}

}  // namespace crossdock
