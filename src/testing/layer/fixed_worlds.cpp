#include <algorithm>
#include <cmath>
#include <random>

#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
namespace {

using reference::MlpWeights;
using Values = std::vector<double>;

constexpr std::array<std::string_view, 12> kFixedRoutingNames = {"balanced",
                                                                 "skewed",
                                                                 "one_expert_takes_all",
                                                                 "rank_receives_nothing",
                                                                 "rank_has_no_tokens",
                                                                 "no_tokens",
                                                                 "absent_routes",
                                                                 "unequal_counts",
                                                                 "rank_without_experts",
                                                                 "padding",
                                                                 "chosen",
                                                                 "losses"};

class NormalDraw {
 public:
  NormalDraw(uint64_t seed, DType dtype) : generator_(seed), dtype_(dtype) {}

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
std::vector<int64_t> draw_experts(NormalDraw& draw, const LayerWorld& world, int skew,
                                  int64_t skip_first, int64_t skip_end) {
  std::vector<int64_t> left;
  for (int64_t e = 0; e < world.spec.config.router.num_experts; ++e) {
    if (e < skip_first || e >= skip_end) left.push_back(e);
  }
  std::vector<int64_t> ids;
  for (int64_t k = 0; k < world.spec.config.router.top_k; ++k) {
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
                                 NormalDraw& draw) {
  const int64_t E = world.spec.config.router.num_experts;
  const int64_t K = world.spec.config.router.top_k;
  const int idle = world.num_ranks() / 2;
  const auto first_of = [&](int rank) { return first_expert(E, world.num_ranks(), rank); };
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
      return draw_experts(draw, world, 0, first_of(idle), first_of(idle + 1));
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
  for (const LayerTokens& rank : world.ranks) {
    routes += rank.T * world.spec.config.router.top_k;
  }
  return routes + world.spec.config.router.num_experts * world.spec.config.dispatch.alignment;
}

}  // namespace

LayerWorld make_layer_world(LayerRouting routing, DType dtype, int num_ranks) {
  LayerWorld world;
  world.spec.config = config_of(routing, dtype, num_ranks);
  world.spec.gate_dtype = dtype;
  world.ranks.resize(static_cast<size_t>(num_ranks));
  const int64_t D = world.spec.config.router.width;
  const int64_t E = world.spec.config.router.num_experts;
  const int64_t turn = static_cast<int64_t>(routing);
  const bool with_biases = turn % 3 == 0;
  const bool is_forced = routing != LayerRouting::kChosen && routing != LayerRouting::kLosses;
  NormalDraw draw(static_cast<uint64_t>(turn) * 10 + static_cast<uint64_t>(dtype), dtype);
  world.gate = draw.values(E * D, 1.0 / std::sqrt(static_cast<double>(D)));
  if (with_biases) world.gate_bias = draw.values(E, 0.5);
  int64_t token = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    LayerTokens& input = world.ranks[static_cast<size_t>(rank)];
    input.T = tokens_of(routing, rank, num_ranks);
    input.x = draw.values(input.T * D, 1.0);
    input.grad_out = draw.values(input.T * D, 1.0);
    world.spec.tokens.push_back(input.T);
    for (int64_t t = 0; t < input.T; ++t, ++token) {
      if (routing == LayerRouting::kPadding) input.mask.push_back(t % 3 == 1 ? 1 : 0);
      if (!is_forced) continue;
      const std::vector<int64_t> ids = route_token(routing, world, token, draw);
      input.forced_ids.insert(input.forced_ids.end(), ids.begin(), ids.end());
    }
  }
  for (int64_t e = 0; e < E; ++e) {
    world.experts.push_back(
        draw.mlp(world.spec.config.experts, D, world.spec.config.experts.inner, with_biases));
  }
  if (world.spec.config.shared_inner > 0) {
    world.shared =
        draw.mlp(world.spec.config.experts, D, world.spec.config.shared_inner, with_biases);
  }
  if (turn % 2 == 0) world.spec.config.dispatch.max_rows = most_rows(world);
  return world;
}

std::vector<Check> list_layer_checks(const std::vector<DType>& dtypes,
                                     const MakePlace& make_place) {
  std::vector<Check> checks;
  for (size_t routing = 0; routing < kFixedRoutingNames.size(); ++routing) {
    for (size_t i = 0; i < dtypes.size(); ++i) {
      const auto make = [=, dtype = dtypes[i]](int num_ranks) {
        return make_layer_world(static_cast<LayerRouting>(routing), dtype, num_ranks);
      };
      std::string name = "layer";
      for (const std::string_view part : {kFixedRoutingNames[routing], name_of(dtypes[i]),
                                          name_of(make(1).spec.config.experts.activation)}) {
        name.append("/").append(part);
      }
      checks.push_back({name, routing % 3 == i, [=](Group& group, const StrategyFactory& strategy) {
                          return judge(group, strategy, make(group.size()),
                                       make_place ? make_place(group) : TensorPlace());
                        }});
    }
  }
  return checks;
}

}  // namespace crossdock::conformance
