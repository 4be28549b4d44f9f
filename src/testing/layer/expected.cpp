#include <algorithm>
#include <cmath>
#include <numeric>

#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
namespace {

using reference::MlpWeights;
using reference::RouterCounts;
using reference::RouterGradients;
using reference::RouterInput;
using reference::RouterResult;
using Values = std::vector<double>;

constexpr std::array kScopes = {BalanceScope::kBatch, BalanceScope::kSequence,
                                BalanceScope::kGlobalBatch};

void add(const Values& term, Values& sum) {
  for (size_t i = 0; i < term.size(); ++i) sum[i] += term[i];
}

void append(const MlpWeights& one, MlpWeights& all) {
  for (const auto member : {&MlpWeights::w1, &MlpWeights::w2, &MlpWeights::b1, &MlpWeights::b2}) {
    (all.*member).insert((all.*member).end(), (one.*member).begin(), (one.*member).end());
  }
}

template <typename T>
std::vector<T> part_of(const std::vector<T>& values, int64_t first, int64_t end, int64_t width) {
  if (values.empty()) return {};
  return {values.begin() + first * width, values.begin() + end * width};
}

int64_t num_used(const std::vector<int64_t>& tokens) {
  return std::ranges::count_if(tokens, [](int64_t count) { return count > 0; });
}

// Routes and tokens of one micro-batch, as the groups of each rank count them.
class Counts {
 public:
  Counts(const LayerWorld& world, const std::vector<LayerTokens>& slices,
         const std::vector<RouterResult>& routes)
      : world_(world), slices_(slices), routes_(routes) {}

  // Of the ranks together; per sequence or as one.
  RouterCounts of(const std::vector<int>& ranks, bool by_sequence) const {
    const auto E = static_cast<size_t>(world_.spec.config.router.num_experts);
    RouterCounts sum;
    for (const int rank : ranks) {
      const LayerTokens& slice = slices_[static_cast<size_t>(rank)];
      const auto B = static_cast<size_t>(by_sequence ? slice.num_sequences : 1);
      if (sum.num_tokens.size() < B) sum.num_tokens.resize(B);
      if (sum.routes_per_expert.size() < B * E) sum.routes_per_expert.resize(B * E);
      for (size_t t = 0; t < static_cast<size_t>(slice.T); ++t) {
        if (!slice.mask.empty() && slice.mask[t] != 0) continue;
        const bool is_first = !by_sequence || slice.sequence_ids.empty();
        const auto b = is_first ? 0 : static_cast<size_t>(slice.sequence_ids[t]);
        ++sum.num_tokens[b];
        const auto K = static_cast<size_t>(world_.spec.config.router.top_k);
        for (size_t k = 0; k < K; ++k) {
          const int64_t id = routes_[static_cast<size_t>(rank)].expert_ids[t * K + k];
          if (id >= 0) ++sum.routes_per_expert[b * E + static_cast<size_t>(id)];
        }
      }
    }
    return sum;
  }

  RouterCounts of_batch(int rank) const {
    const LayerSpec& spec = world_.spec;
    const auto& groups = spec.counting_groups.empty() ? spec.layer_groups : spec.counting_groups;
    return of(members_of(groups, spec.num_ranks(), rank), false);
  }

  // See MoeLayerOptions::sequence_group and MoeForwardArgs::total_sequences.
  RouterCounts of_sequences(int rank) const {
    const LayerSpec& spec = world_.spec;
    const int P = spec.num_ranks();
    const bool are_named = !spec.sequence_groups.empty() || !spec.counting_groups.empty();
    const auto& named = spec.sequence_groups.empty() ? spec.counting_groups : spec.sequence_groups;
    RouterCounts counts;
    if (are_named) {
      counts = of(members_of(named, P, rank), true);
      counts.total_sequences = static_cast<double>(num_used(counts.num_tokens));
    } else {
      counts = of(sharing(rank), true);
      for (const int other : members_of(spec.layer_groups, P, rank)) {
        const std::vector<int> holders = sharing(other);
        counts.total_sequences += static_cast<double>(num_used(of(holders, true).num_tokens)) /
                                  static_cast<double>(holders.size());
      }
    }
    if (spec.total_sequences > 0) {
      counts.total_sequences = static_cast<double>(spec.total_sequences);
    }
    return counts;
  }

 private:
  // The ranks that hold slices of the same tokens.
  std::vector<int> sharing(int rank) const {
    const LayerSpec& spec = world_.spec;
    if (spec.replicated_over.empty()) return {rank};
    return members_of(spec.replicated_over, spec.num_ranks(), rank);
  }

  const LayerWorld& world_;
  const std::vector<LayerTokens>& slices_;
  const std::vector<RouterResult>& routes_;
};

// The slices of one micro-batch and their routes.
struct Routed {
  std::vector<LayerTokens> slices;
  std::vector<RouterInput> inputs;
  std::vector<RouterResult> routes;
};

Routed route_all(const LayerWorld& world, const std::vector<LayerTokens>& ranks) {
  Routed routed;
  for (int rank = 0; rank < std::ssize(ranks); ++rank) {
    routed.slices.push_back(slice_of(world.spec, ranks, rank));
    routed.inputs.push_back(router_input(world, routed.slices.back()));
    routed.routes.push_back(reference::route(routed.inputs.back()));
  }
  return routed;
}

// The losses of one rank and their gradients: the sum over the auxiliary losses, each as if it were
// the only one.
struct RouterStep {
  Values losses = Values(5);
  RouterGradients grads;
  RouterCounts batch;
  RouterCounts sequences;
};

RouterStep step_of(const LayerWorld& world, const Routed& routed, const Counts& counts,
                   const RouterCounts& earlier, int rank, const Values& grad_weights) {
  const auto r = static_cast<size_t>(rank);
  const RouterConfig& config = world.spec.config.router;
  RouterInput input = routed.inputs[r];
  RouterStep step;
  step.batch = counts.of_batch(rank);
  step.batch.total_tokens = step.batch.num_tokens[0];
  if (config.counts(BalanceScope::kSequence)) step.sequences = counts.of_sequences(rank);
  RouterCounts global = step.batch;
  for (size_t e = 0; e < earlier.routes_per_expert.size(); ++e) {
    global.routes_per_expert[e] += earlier.routes_per_expert[e];
  }
  if (!earlier.num_tokens.empty()) global.num_tokens[0] += earlier.num_tokens[0];

  input.config.aux_loss_coeffs = {};
  input.config.aux_loss_scope = BalanceScope::kBatch;
  input.config.aux_loss_coeff = 0.0;
  const double factor = world.spec.grad_losses;
  step.losses[1] = reference::router_losses(input, routed.routes[r], step.batch).z;
  step.grads = reference::route_backward(input, routed.routes[r], grad_weights, step.batch, factor);
  input.config.z_loss_coeff = 0.0;
  const Values no_weights(grad_weights.size(), 0.0);
  for (size_t i = 0; i < kScopes.size(); ++i) {
    input.config.aux_loss_scope = kScopes[i];
    input.config.aux_loss_coeff = config.aux_coeff(kScopes[i]);
    if (input.config.aux_loss_coeff == 0.0) continue;
    const RouterCounts& counted = kScopes[i] == BalanceScope::kBatch      ? step.batch
                                  : kScopes[i] == BalanceScope::kSequence ? step.sequences
                                                                          : global;
    step.losses[2 + i] = reference::router_losses(input, routed.routes[r], counted).aux;
    step.losses[0] += step.losses[2 + i];
    const RouterGradients grads =
        reference::route_backward(input, routed.routes[r], no_weights, counted, factor);
    add(grads.x, step.grads.x);
    add(grads.gate, step.grads.gate);
    add(grads.gate_bias, step.grads.gate_bias);
  }
  return step;
}

// The layers' groups, each with its results.
struct LayerGroup {
  std::vector<int> members;
  reference::LayerOutput output;
};

LayerGroup run_group(const LayerWorld& world, const Routed& routed, std::vector<int> members) {
  const MoeLayerConfig& config = world.spec.config;
  reference::LayerInput input{
      .config = config.dispatch,
      .ranks = {},
      .weights_in_experts = config.experts.weights_in == WeightsIn::kExperts,
      .mlp = mlp_of(world.spec, config.experts.inner),
      .experts = world.experts};
  input.config.num_experts = config.router.num_experts;
  input.config.top_k = config.router.top_k;
  input.config.width = config.router.width;
  for (const int rank : members) {
    const auto r = static_cast<size_t>(rank);
    input.ranks.push_back({.T = routed.slices[r].T,
                           .x = routed.slices[r].x,
                           .expert_ids = routed.routes[r].expert_ids,
                           .weights = routed.routes[r].weights,
                           .grad_out = routed.slices[r].grad_out,
                           .mask = routed.slices[r].mask});
  }
  return {std::move(members), reference::run_layer(input)};
}

// The gradients that the caller asked for, added to those that it already has.
void finish_gradients(const LayerSpec& spec, LayerResults& results) {
  if (spec.skip_gate_gradients) results.grad_gate.clear();
  if (spec.skip_gate_gradients) results.grad_gate_bias.clear();
  if (spec.skip_expert_gradients) results.grad_experts.w1.clear();
  if (spec.skip_expert_gradients) results.grad_experts.b1.clear();
  if (spec.skip_shared_gradients) results.grad_shared = {};
  if (!spec.accumulate) return;
  for (Values* values : {&results.grad_gate, &results.grad_gate_bias, &results.grad_experts.w1,
                         &results.grad_experts.w2, &results.grad_experts.b1,
                         &results.grad_experts.b2, &results.grad_shared.w1, &results.grad_shared.w2,
                         &results.grad_shared.b1, &results.grad_shared.b2}) {
    for (double& value : *values) value += kInitialGradient;
  }
}

void add_shared(const LayerWorld& world, const LayerTokens& slice, LayerResults& results) {
  const int64_t inner = world.spec.config.shared_inner;
  if (inner == 0) return;
  const reference::MlpConfig mlp = mlp_of(world.spec, inner);
  add(reference::mlp_forward(mlp, world.shared, slice.x), results.out);
  const reference::MlpGradients grads =
      reference::mlp_backward(mlp, world.shared, slice.x, {}, slice.grad_out);
  add(grads.rows, results.grad_x);
  results.grad_shared = grads.expert;
}

// out and grad_x of replicated tokens are those of all slices.
void gather_slices(const LayerSpec& spec, std::vector<LayerResults>& results) {
  if (spec.replicated_over.empty()) return;
  const std::vector<LayerResults> slices = results;
  for (int rank = 0; rank < spec.num_ranks(); ++rank) {
    for (Values LayerResults::*member : {&LayerResults::out, &LayerResults::grad_x}) {
      Values& all = results[static_cast<size_t>(rank)].*member;
      all.clear();
      for (const int holder : members_of(spec.replicated_over, spec.num_ranks(), rank)) {
        const Values& slice = slices[static_cast<size_t>(holder)].*member;
        all.insert(all.end(), slice.begin(), slice.end());
      }
    }
  }
}

Values as_values(const std::vector<int64_t>& counts) {
  return {counts.begin(), counts.end()};
}

}  // namespace

std::vector<int> members_of(const std::vector<int64_t>& groups, int num_ranks, int rank) {
  std::vector<int> members;
  for (int r = 0; r < num_ranks; ++r) {
    const bool is_in =
        groups.empty() || groups[static_cast<size_t>(r)] == groups[static_cast<size_t>(rank)];
    if (is_in) members.push_back(r);
  }
  return members;
}

LayerTokens slice_of(const LayerSpec& spec, const std::vector<LayerTokens>& ranks, int rank) {
  LayerTokens tokens = ranks[static_cast<size_t>(rank)];
  if (tokens.token_ids.empty()) {
    tokens.token_ids.resize(static_cast<size_t>(tokens.T));
    std::iota(tokens.token_ids.begin(), tokens.token_ids.end(), int64_t{0});
  }
  if (spec.replicated_over.empty()) return tokens;
  const std::vector<int> holders = members_of(spec.replicated_over, spec.num_ranks(), rank);
  const int64_t index = std::ranges::find(holders, rank) - holders.begin();
  const int64_t size = (tokens.T + std::ssize(holders) - 1) / std::ssize(holders);
  const int64_t first = std::min(index * size, tokens.T);
  const int64_t end = std::min(first + size, tokens.T);
  const int64_t D = spec.config.router.width;
  return {.T = end - first,
          .x = part_of(tokens.x, first, end, D),
          .grad_out = part_of(tokens.grad_out, first, end, D),
          .mask = part_of(tokens.mask, first, end, 1),
          .forced_ids = part_of(tokens.forced_ids, first, end, spec.config.router.top_k),
          .sequence_ids = part_of(tokens.sequence_ids, first, end, 1),
          .token_ids = part_of(tokens.token_ids, first, end, 1),
          .num_sequences = tokens.num_sequences};
}

std::vector<int64_t> experts_of(const LayerSpec& spec, int rank) {
  const std::vector<int> members = members_of(spec.layer_groups, spec.num_ranks(), rank);
  const int64_t etp = spec.config.etp;
  const int64_t owner = (std::ranges::find(members, rank) - members.begin()) / etp;
  DispatchConfig config = spec.config.dispatch;
  config.num_experts = spec.config.router.num_experts;
  const std::vector<int32_t> owners =
      reference::owners_of(config, static_cast<int>(std::ssize(members) / etp));
  std::vector<int64_t> experts;
  for (int64_t e = 0; e < std::ssize(owners); ++e) {
    if (owners[static_cast<size_t>(e)] == owner) experts.push_back(e);
  }
  return experts;
}

reference::MlpConfig mlp_of(const LayerSpec& spec, int64_t inner) {
  const ExpertsConfig& experts = spec.config.experts;
  return {spec.config.router.width, inner, experts.activation, experts.interleaved, experts.limit};
}

RouterInput router_input(const LayerWorld& world, const LayerTokens& slice) {
  RouterInput input{.config = world.spec.config.router,
                    .T = slice.T,
                    .x = slice.x,
                    .gate = world.gate,
                    .gate_bias = world.gate_bias,
                    .expert_bias = world.expert_bias,
                    .mask = slice.mask,
                    .forced_ids = slice.forced_ids};
  // Counted by Counts: route would have to know which sequences ranks share.
  input.config.aux_loss_scope = BalanceScope::kBatch;
  input.sequence_ids = slice.sequence_ids;
  input.num_sequences = slice.num_sequences;
  const Values factors =
      reference::jitter_factors(input.config, world.spec.jitter_seed, slice.token_ids);
  for (size_t i = 0; i < input.x.size(); ++i) input.x[i] *= factors[i];
  return input;
}

std::vector<LayerResults> expected_results(const LayerWorld& world) {
  const LayerSpec& spec = world.spec;
  const Routed routed = route_all(world, world.ranks);
  const Counts counts(world, routed.slices, routed.routes);
  const Routed first = route_all(world, world.earlier);
  const Counts first_counts(world, first.slices, first.routes);
  std::vector<LayerGroup> groups;
  std::vector<LayerResults> results;
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    const std::vector<int> members = members_of(spec.layer_groups, world.num_ranks(), rank);
    auto group = std::ranges::find(groups, members, &LayerGroup::members);
    if (group == groups.end()) {
      group = groups.insert(groups.end(), run_group(world, routed, members));
    }
    const auto index = static_cast<size_t>(std::ranges::find(members, rank) - members.begin());
    const RouterCounts earlier =
        world.earlier.empty() ? RouterCounts() : first_counts.of_batch(rank);
    const RouterStep step =
        step_of(world, routed, counts, earlier, rank, group->output.grad_weights[index]);
    LayerResults result{
        .out = group->output.out[index],
        .grad_x = group->output.grad_x[index],
        .grad_gate = step.grads.gate,
        .grad_gate_bias = world.gate_bias.empty() ? Values() : step.grads.gate_bias,
        .grad_experts = {},
        .grad_shared = {},
        .load = as_values(counts.of(members, false).routes_per_expert),
        .dropped = as_values(group->output.layout.dropped[index]),
        .losses = step.losses,
        .totals = {static_cast<double>(step.batch.total_tokens), step.sequences.total_sequences}};
    const Values factors =
        reference::jitter_factors(spec.config.router, spec.jitter_seed, routed.slices[r].token_ids);
    for (size_t i = 0; i < factors.size(); ++i) {
      result.grad_x[i] += factors[i] * step.grads.x[i];
    }
    for (const int64_t e : experts_of(spec, rank)) {
      append(reference::shard_of(mlp_of(spec, spec.config.experts.inner),
                                 group->output.expert_grads[static_cast<size_t>(e)],
                                 spec.config.etp, static_cast<int64_t>(index) % spec.config.etp),
             result.grad_experts);
    }
    add_shared(world, routed.slices[r], result);
    finish_gradients(spec, result);
    results.push_back(std::move(result));
  }
  gather_slices(spec, results);
  return results;
}

}  // namespace crossdock::conformance
