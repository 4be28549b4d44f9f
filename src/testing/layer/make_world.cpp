#include <algorithm>
#include <cmath>

#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
namespace {

using reference::MlpWeights;
using reference::RouterInput;
using reference::RouterResult;
using Values = std::vector<double>;

// Scores and weights are computed in fp32 from exact inputs: their errors are some 1e-6. Closer
// decisions are not left to rounding.
constexpr double kDecisiveMargin = 1e-4;
constexpr int kMostAttempts = 40;

double unit_sum(int64_t terms) {
  return 1.0 / std::sqrt(static_cast<double>(terms));
}

MlpWeights draw_mlp(const LayerSpec& spec, int64_t inner, bool b1, bool b2, Draw& draw) {
  const int64_t D = spec.config.router.width;
  const int64_t hidden = is_gated(spec.config.experts.activation) ? 2 * inner : inner;
  const DType dtype = spec.dtype();
  MlpWeights mlp{.w1 = draw.values(hidden * D, unit_sum(D), dtype),
                 .w2 = draw.values(D * inner, unit_sum(inner), dtype)};
  if (b1) mlp.b1 = draw.values(hidden, 0.5, dtype);
  if (b2) mlp.b2 = draw.values(D, 0.5, dtype);
  return mlp;
}

// K different experts of a token; a share of the slots is -1.
void draw_ids(const LayerSpec& spec, Draw& draw, std::vector<int64_t>& ids) {
  std::vector<int64_t> left;
  for (int64_t e = 0; e < spec.config.router.num_experts; ++e) left.push_back(e);
  for (int64_t k = 0; k < spec.config.router.top_k; ++k) {
    const int64_t index = draw.between(0, std::ssize(left) - 1);
    const int64_t id = left[static_cast<size_t>(index)];
    left.erase(left.begin() + index);
    ids.push_back(draw.percent(spec.absent_percent) ? -1 : id);
  }
}

LayerTokens draw_tokens(const LayerSpec& spec, int64_t T, int64_t num_sequences, Draw& draw) {
  const int64_t D = spec.config.router.width;
  LayerTokens tokens{.T = T,
                     .x = draw.values(T * D, 1.0, spec.dtype()),
                     .grad_out = draw.values(T * D, 1.0, spec.dtype()),
                     .num_sequences = num_sequences};
  for (int64_t t = 0; t < T; ++t) {
    if (spec.padding_percent > 0) tokens.mask.push_back(draw.percent(spec.padding_percent));
    if (spec.forced_ids) draw_ids(spec, draw, tokens.forced_ids);
    if (num_sequences > 1) {
      tokens.sequence_ids.push_back(static_cast<int32_t>(draw.between(0, num_sequences - 1)));
    }
    if (spec.token_ids) tokens.token_ids.push_back(draw.between(0, 1'000'000));
  }
  return tokens;
}

// Ranks that hold the same tokens, or equal ones, draw the same numbers.
std::vector<LayerTokens> draw_ranks(const LayerSpec& spec, uint64_t seed) {
  std::vector<LayerTokens> ranks;
  const bool share_sequences = !spec.sequence_groups.empty() || !spec.counting_groups.empty() ||
                               !spec.replicated_over.empty();
  for (int rank = 0; rank < spec.num_ranks(); ++rank) {
    const int64_t T = spec.tokens[static_cast<size_t>(rank)];
    int holder = members_of(spec.replicated_over, spec.num_ranks(), rank)[0];
    if (spec.replicated_over.empty()) holder = rank;
    if (spec.equal_tokens && T == spec.tokens[0]) holder = 0;
    const int64_t fewer = share_sequences || spec.equal_tokens ? 0 : rank % 2;
    Draw draw(seed + 1 + static_cast<uint64_t>(holder));
    ranks.push_back(draw_tokens(spec, T, std::max<int64_t>(spec.num_sequences - fewer, 1), draw));
  }
  return ranks;
}

LayerWorld draw_world(const LayerSpec& spec, uint64_t seed) {
  const RouterConfig& router = spec.config.router;
  Draw draw(seed);
  LayerWorld world{.spec = spec, .ranks = draw_ranks(spec, draw.bits())};
  if (spec.earlier) world.earlier = draw_ranks(spec, draw.bits());
  world.gate =
      draw.values(router.num_experts * router.width, unit_sum(router.width), spec.gate_dtype);
  if (spec.gate_bias) world.gate_bias = draw.values(router.num_experts, 0.5, spec.gate_dtype);
  if (spec.expert_bias) world.expert_bias = draw.values(router.num_experts, 0.3, spec.sum_dtype());
  for (int64_t e = 0; e < router.num_experts; ++e) {
    world.experts.push_back(draw_mlp(spec, spec.config.experts.inner, spec.b1, spec.b2, draw));
  }
  if (const int64_t inner = spec.config.shared_inner; inner > 0) {
    world.shared = draw_mlp(spec, inner, spec.shared_biases, spec.shared_biases, draw);
  }
  return world;
}

// Whether drops by weight are decided by more than rounding, or by position among equal weights.
bool drops_are_decisive(const LayerSpec& spec, const RouterInput& input,
                        const RouterResult& routes) {
  const auto& capacity = spec.config.dispatch.capacity;
  if (!capacity || capacity->policy != DropPolicy::kWeight) return true;
  const RouterConfig& router = spec.config.router;
  const int64_t C =
      reference::capacity_of(capacity->pad_to_capacity ? capacity->max_tokens : input.T,
                             router.top_k, router.num_experts, capacity->factor);
  std::vector<Values> weights(static_cast<size_t>(router.num_experts));
  for (size_t i = 0; i < routes.expert_ids.size(); ++i) {
    const int64_t id = routes.expert_ids[i];
    if (id >= 0) weights[static_cast<size_t>(id)].push_back(routes.weights[i]);
  }
  return std::ranges::all_of(weights, [&](Values& of_expert) {
    if (C == 0 || std::ssize(of_expert) <= C) return true;
    std::ranges::sort(of_expert, std::greater());
    const double kept = of_expert[static_cast<size_t>(C - 1)];
    const double dropped = of_expert[static_cast<size_t>(C)];
    return kept == dropped || kept - dropped > kDecisiveMargin * (0.1 + std::abs(kept));
  });
}

bool selections_are_decisive(const LayerWorld& world, const std::vector<LayerTokens>& ranks) {
  for (int rank = 0; rank < std::ssize(ranks); ++rank) {
    const RouterInput input = router_input(world, slice_of(world.spec, ranks, rank));
    const RouterResult routes = reference::route(input);
    if (reference::selection_margin(input, routes) < kDecisiveMargin) return false;
    if (!drops_are_decisive(world.spec, input, routes)) return false;
  }
  return true;
}

// |W1 x + b1| of all tokens at one expert, or its largest error relative to it: see clear_limit.
void append_hidden(const MlpWeights& expert, const Values& x, int64_t D, Values& hidden) {
  const auto width = static_cast<size_t>(D);
  for (size_t row = 0; row * width < expert.w1.size(); ++row) {
    for (size_t t = 0; t * width < x.size(); ++t) {
      double h = expert.b1.empty() ? 0.0 : expert.b1[row];
      for (size_t d = 0; d < width; ++d) h += expert.w1[row * width + d] * x[t * width + d];
      hidden.push_back(std::abs(h));
    }
  }
}

// The gradient jumps at the limit of clamped_swiglu and limited_swiglu. Returns the first limit,
// from the given one upwards, that no rounded hidden value of any token may cross.
double clear_limit(const LayerWorld& world) {
  const ExpertsConfig& config = world.spec.config.experts;
  if (config.activation != Activation::kClampedSwiglu &&
      config.activation != Activation::kLimitedSwiglu) {
    return config.limit;
  }
  Values hidden;
  for (const LayerTokens& tokens : world.ranks) {
    for (const MlpWeights& expert : world.experts) {
      append_hidden(expert, tokens.x, world.spec.config.router.width, hidden);
    }
    append_hidden(world.shared, tokens.x, world.spec.config.router.width, hidden);
  }
  std::ranges::sort(hidden);
  // hidden values are rounded to the dtype, by at most 2^-8 of bf16
  const bool is_small = world.spec.dtype() == DType::kBF16 || world.spec.dtype() == DType::kF16;
  const double margin = is_small ? 0x1p-7 : kDecisiveMargin;
  double limit = config.limit;
  for (const double h : hidden) {
    if (h > limit * (1 + margin)) break;
    if (h > limit * (1 - margin)) limit = h * (1 + 2 * margin);
  }
  return limit;
}

// Options of the dispatch that follow from the sizes.
void complete(LayerSpec& spec) {
  DispatchConfig& dispatch = spec.config.dispatch;
  const RouterConfig& router = spec.config.router;
  int64_t num_rows = router.num_experts * dispatch.alignment;
  for (const int64_t T : spec.tokens) num_rows += T * router.top_k;
  if (spec.capacity_factor > 0) {
    const int64_t most = std::max<int64_t>(std::ranges::max(spec.tokens), 1);
    dispatch.capacity = {.factor = spec.capacity_factor,
                         .policy = spec.drop_policy,
                         .pad_to_capacity = spec.pad_to_capacity,
                         .max_tokens = most};
    num_rows +=
        router.num_experts * spec.num_ranks() *
        reference::capacity_of(most, router.top_k, router.num_experts, spec.capacity_factor);
  }
  if (spec.limit_rows) dispatch.max_rows = num_rows;
}

}  // namespace

LayerWorld make_layer_world(const LayerSpec& given) {
  LayerSpec spec = given;
  complete(spec);
  LayerWorld world;
  for (uint64_t attempt = 0; attempt < kMostAttempts; ++attempt) {
    world = draw_world(spec, spec.seed + (attempt << 32));
    world.spec.config.experts.limit = clear_limit(world);
    if (selections_are_decisive(world, world.ranks) &&
        selections_are_decisive(world, world.earlier)) {
      return world;
    }
  }
  return world;
}

}  // namespace crossdock::conformance
