#include "cli/verify/layer_world.hpp"

#include <algorithm>
#include <cmath>
#include <random>

namespace crossdock::cli {
namespace {

using reference::MlpWeights;
using reference::RouterCounts;
using reference::RouterResult;
using Values = std::vector<double>;

class Draw {
 public:
  Draw(uint64_t seed, DType dtype) : generator_(seed), dtype_(dtype) {}

  Values values(int64_t count, double scale) {
    Values all(static_cast<size_t>(count));
    for (double& value : all) value = reference::round_to(dtype_, scale * normal_(generator_));
    return all;
  }
  MlpWeights mlp(const ExpertsConfig& config, int64_t D, int64_t F, bool with_biases) {
    const int64_t hidden = is_gated(config.activation) ? 2 * F : F;
    MlpWeights weights{.w1 = values(hidden * D, 1.0 / std::sqrt(static_cast<double>(D))),
                       .w2 = values(D * F, 1.0 / std::sqrt(static_cast<double>(F)))};
    if (!with_biases) return weights;
    weights.b1 = values(hidden, 0.5);
    weights.b2 = values(D, 0.5);
    return weights;
  }
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(generator_() % static_cast<uint64_t>(limit));
  }

 private:
  std::mt19937_64 generator_;
  std::normal_distribution<double> normal_;
  DType dtype_;
};

int64_t tokens_of(LayerRouting routing, int rank, int num_ranks) {
  switch (routing) {
    case LayerRouting::kNoTokens:
      return 0;
    case LayerRouting::kRankHasNoTokens:
      return rank == num_ranks / 2 ? 0 : 11;
    case LayerRouting::kUnequalCounts:
      return (rank * 7 + 3) % 17;
    default:
      return 9;
  }
}

// K different experts in [0, E) except [skip_first, skip_end); a larger `skew` favours the first
// ones. Slots for which no expert is left are -1.
std::vector<int64_t> draw_experts(Draw& draw, const LayerWorld& world, int skew, int64_t skip_first,
                                  int64_t skip_end) {
  std::vector<int64_t> left;
  for (int64_t e = 0; e < world.config.router.num_experts; ++e) {
    if (e < skip_first || e >= skip_end) left.push_back(e);
  }
  std::vector<int64_t> ids;
  for (int64_t k = 0; k < world.config.router.top_k; ++k) {
    if (left.empty()) {
      ids.push_back(-1);
      continue;
    }
    int64_t index = draw.below(std::ssize(left));
    for (int i = 0; i < skew; ++i) index = std::min(index, draw.below(std::ssize(left)));
    ids.push_back(left[static_cast<size_t>(index)]);
    left.erase(left.begin() + index);
  }
  return ids;
}

std::vector<int64_t> route_token(LayerRouting routing, const LayerWorld& world, int64_t token,
                                 Draw& draw) {
  const int64_t E = world.config.router.num_experts;
  const int64_t K = world.config.router.top_k;
  const int idle = world.num_ranks() / 2;
  std::vector<int64_t> ids = draw_experts(draw, world, 0, 0, 0);
  switch (routing) {
    case LayerRouting::kBalanced:
      for (int64_t k = 0; k < K; ++k) ids[static_cast<size_t>(k)] = (token * K + k) % E;
      return ids;
    case LayerRouting::kSkewed:
      return draw_experts(draw, world, 3, 0, 0);
    case LayerRouting::kOneExpertTakesAll:
      std::ranges::fill(ids, -1);
      ids[0] = E / 2;
      return ids;
    case LayerRouting::kRankReceivesNothing:
      return draw_experts(draw, world, 0, world.first_expert(idle), world.first_expert(idle + 1));
    case LayerRouting::kAbsentRoutes:
      for (int64_t& id : ids) {
        if (token % 4 == 1 || draw.below(3) == 0) id = -1;
      }
      return ids;
    default:
      return ids;
  }
}

// The settings, besides the routes, that differ between routings.
MoeLayerConfig config_of(LayerRouting routing, DType dtype, int num_ranks) {
  const auto turn = static_cast<int64_t>(routing);
  MoeLayerConfig config;
  const bool is_short = routing == LayerRouting::kRankWithoutExperts;
  RouterConfig& router = config.router;
  router.num_experts = is_short ? std::max(1, num_ranks - 1) : 2 * num_ranks + 3;
  router.top_k = std::min<int64_t>(2, router.num_experts);
  router.width = turn % 3 == 2 ? 21 : 24;
  router.dtype = dtype;
  router.score = static_cast<Score>(turn % 4);
  if (routing == LayerRouting::kLosses) {
    router.aux_loss_coeff = 0.5;
    router.z_loss_coeff = 0.25;
  }
  ExpertsConfig& experts = config.experts;
  experts.inner = turn % 3 == 2 ? 13 : 16;
  experts.dtype = dtype;
  experts.activation = static_cast<Activation>(turn % std::ssize(kActivationNames));
  experts.interleaved = is_gated(experts.activation) && turn >= std::ssize(kActivationNames);
  const bool is_odd = (turn + static_cast<int64_t>(dtype)) % 2 == 1;
  experts.weights_in = is_odd ? WeightsIn::kExperts : WeightsIn::kCombine;
  config.shared_inner = turn % 4 == 1 ? 8 : 0;
  config.dispatch.alignment = turn % 5 == 3 ? 8 : 1;
  config.allow_equal_tokens = true;
  return config;
}

// The largest number of rows that a rank can receive, for plans that a GPU makes without waiting.
int64_t most_rows(const LayerWorld& world) {
  int64_t routes = 0;
  for (const reference::RouterInput& rank : world.ranks) {
    routes += rank.T * world.config.router.top_k;
  }
  return routes + world.config.router.num_experts * world.config.dispatch.alignment;
}

void add(const Values& term, Values& sum) {
  for (size_t i = 0; i < term.size(); ++i) sum[i] += term[i];
}

void append(const Values& values, Values& all) {
  all.insert(all.end(), values.begin(), values.end());
}

reference::MlpConfig mlp_of(const LayerWorld& world, int64_t F) {
  const ExpertsConfig& experts = world.config.experts;
  return {world.config.router.width, F, experts.activation, experts.interleaved, experts.limit};
}

RouterCounts counts_of_all(const LayerWorld& world, const std::vector<RouterResult>& routes) {
  RouterCounts sum{.routes_per_expert =
                       std::vector<int64_t>(static_cast<size_t>(world.config.router.num_experts)),
                   .num_tokens = {0}};
  for (const RouterResult& rank : routes) {
    for (size_t e = 0; e < sum.routes_per_expert.size(); ++e) {
      sum.routes_per_expert[e] += rank.counts.routes_per_expert[e];
    }
    sum.num_tokens[0] += rank.counts.num_tokens[0];
  }
  return sum;
}

}  // namespace

LayerWorld make_layer_world(LayerRouting routing, DType dtype, int num_ranks) {
  LayerWorld world;
  world.config = config_of(routing, dtype, num_ranks);
  world.ranks.resize(static_cast<size_t>(num_ranks));
  const int64_t D = world.config.router.width;
  const int64_t E = world.config.router.num_experts;
  const int64_t turn = static_cast<int64_t>(routing);
  const bool with_biases = turn % 3 == 0;
  const bool is_forced = routing != LayerRouting::kChosen && routing != LayerRouting::kLosses;
  Draw draw(static_cast<uint64_t>(turn) * 10 + static_cast<uint64_t>(dtype), dtype);
  const Values gate = draw.values(E * D, 1.0 / std::sqrt(static_cast<double>(D)));
  const Values gate_bias = with_biases ? draw.values(E, 0.5) : Values();
  int64_t token = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    reference::RouterInput& input = world.ranks[static_cast<size_t>(rank)];
    input.config = world.config.router;
    input.T = tokens_of(routing, rank, num_ranks);
    input.x = draw.values(input.T * D, 1.0);
    input.gate = gate;
    input.gate_bias = gate_bias;
    world.grad_out.push_back(draw.values(input.T * D, 1.0));
    for (int64_t t = 0; t < input.T; ++t, ++token) {
      if (routing == LayerRouting::kPadding) input.mask.push_back(t % 3 == 1 ? 1 : 0);
      if (!is_forced) continue;
      const std::vector<int64_t> ids = route_token(routing, world, token, draw);
      input.forced_ids.insert(input.forced_ids.end(), ids.begin(), ids.end());
    }
  }
  for (int64_t e = 0; e < E; ++e) {
    world.experts.push_back(
        draw.mlp(world.config.experts, D, world.config.experts.inner, with_biases));
  }
  if (world.config.shared_inner > 0) {
    world.shared = draw.mlp(world.config.experts, D, world.config.shared_inner, with_biases);
  }
  if (turn % 2 == 0) world.config.dispatch.max_rows = most_rows(world);
  return world;
}

LayerResults expected_results(const LayerWorld& world, int rank) {
  const MoeLayerConfig& config = world.config;
  std::vector<RouterResult> routes;
  reference::LayerInput input{
      .config = config.dispatch,
      .weights_in_experts = config.experts.weights_in == WeightsIn::kExperts,
      .mlp = mlp_of(world, config.experts.inner),
      .experts = world.experts};
  input.config.num_experts = config.router.num_experts;
  input.config.top_k = config.router.top_k;
  input.config.width = config.router.width;
  for (size_t r = 0; r < world.ranks.size(); ++r) {
    const reference::RouterInput& own = world.ranks[r];
    routes.push_back(reference::route(own));
    input.ranks.push_back({.T = own.T,
                           .x = own.x,
                           .expert_ids = routes.back().expert_ids,
                           .weights = routes.back().weights,
                           .grad_out = world.grad_out[r],
                           .mask = own.mask});
  }
  const RouterCounts counts = counts_of_all(world, routes);
  const reference::LayerOutput layer = reference::run_layer(input);
  const auto r = static_cast<size_t>(rank);
  const reference::RouterInput& own = world.ranks[r];
  const reference::RouterGradients router =
      reference::route_backward(own, routes[r], layer.grad_weights[r], counts);
  const reference::RouterLossValues losses = reference::router_losses(own, routes[r], counts);

  LayerResults results{.out = layer.out[r],
                       .grad_x = layer.grad_x[r],
                       .grad_gate = router.gate,
                       .grad_gate_bias = own.gate_bias.empty() ? Values() : router.gate_bias,
                       .grad_experts = {},
                       .grad_shared = {},
                       .load = {counts.routes_per_expert.begin(), counts.routes_per_expert.end()},
                       .losses = {losses.aux, losses.z}};
  add(router.x, results.grad_x);
  for (int64_t e = world.first_expert(rank); e < world.first_expert(rank + 1); ++e) {
    const MlpWeights& grads = layer.expert_grads[static_cast<size_t>(e)];
    append(grads.w1, results.grad_experts.w1);
    append(grads.w2, results.grad_experts.w2);
    append(grads.b1, results.grad_experts.b1);
    append(grads.b2, results.grad_experts.b2);
  }
  if (config.shared_inner > 0) {
    const reference::MlpConfig mlp = mlp_of(world, config.shared_inner);
    add(reference::mlp_forward(mlp, world.shared, own.x), results.out);
    const reference::MlpGradients grads =
        reference::mlp_backward(mlp, world.shared, own.x, {}, world.grad_out[r]);
    add(grads.rows, results.grad_x);
    results.grad_shared = grads.expert;
  }
  return results;
}

}  // namespace crossdock::cli
