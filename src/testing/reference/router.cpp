#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "crossdock/testing/reference_router.hpp"

namespace crossdock::reference {
namespace {

// A value and its slope along one direction: evaluating a formula on these differentiates it.
struct Dual {
  double value = 0.0;
  double slope = 0.0;
};

Dual operator+(Dual a, Dual b) {
  return {a.value + b.value, a.slope + b.slope};
}
Dual operator+(Dual a, double b) {
  return {a.value + b, a.slope};
}
Dual operator-(Dual a, double b) {
  return {a.value - b, a.slope};
}
Dual operator*(Dual a, Dual b) {
  return {a.value * b.value, a.slope * b.value + a.value * b.slope};
}
Dual operator*(Dual a, double b) {
  return {a.value * b, a.slope * b};
}
Dual operator/(Dual a, Dual b) {
  return {a.value / b.value, (a.slope * b.value - a.value * b.slope) / (b.value * b.value)};
}
Dual exp(Dual a) {
  return {std::exp(a.value), a.slope * std::exp(a.value)};
}
Dual log(Dual a) {
  return {std::log(a.value), a.slope / a.value};
}
Dual sqrt(Dual a) {
  return {std::sqrt(a.value), a.slope / (2.0 * std::sqrt(a.value))};
}

using Row = std::vector<Dual>;

bool is_sigmoid_kind(Score score) {
  return score == Score::kSigmoid || score == Score::kSqrtSoftplus;
}

Dual sum(const Row& row) {
  Dual total;
  for (const Dual& value : row) total = total + value;
  return total;
}

double largest(const Row& row) {
  double result = row[0].value;
  for (const Dual& value : row) result = std::max(result, value.value);
  return result;
}

Row softmax(const Row& logits) {
  const double shift = largest(logits);
  Row result;
  for (const Dual& logit : logits) result.push_back(exp(logit - shift));
  const Dual total = sum(result);
  for (Dual& value : result) value = value / total;
  return result;
}

// The score of one expert, for the sigmoid kinds.
Dual score_of(Score kind, Dual logit) {
  const Dual e = exp(logit * -1.0);
  const Dual one{1.0, 0.0};
  if (kind == Score::kSigmoid) return one / (e + 1.0);
  // log(1 + exp(x)) = x + log(1 + exp(-x)): uses the form that does not overflow.
  return logit.value > 0.0 ? sqrt(logit + log(e + 1.0)) : sqrt(log(exp(logit) + 1.0));
}

Row scores_of(Score kind, const Row& logits) {
  if (kind == Score::kSoftmax) return softmax(logits);
  if (kind == Score::kSoftmaxAfterTopK) return logits;
  Row result;
  for (const Dual& logit : logits) result.push_back(score_of(kind, logit));
  return result;
}

// [K] weights of one token, from the scores of the slots that have an expert.
Row weights_of(const RouterConfig& config, Row chosen, const int64_t* ids) {
  if (!chosen.empty() && config.score == Score::kSoftmaxAfterTopK) chosen = softmax(chosen);
  if (config.normalises()) {
    const Dual total = sum(chosen) + 1e-20;
    for (Dual& weight : chosen) weight = weight / total;
  }
  Row weights;
  size_t next = 0;
  for (int64_t k = 0; k < config.top_k; ++k) {
    weights.push_back(ids[k] >= 0 ? chosen[next++] * config.scaling : Dual{});
  }
  return weights;
}

// Positions in descending order of value, lower positions first among equals.
std::vector<int64_t> ranked(const std::vector<double>& values) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

// [G] scores of the groups.
std::vector<double> group_scores(const RouterConfig& config, const std::vector<double>& biased) {
  const int64_t size = config.num_experts / config.num_groups;
  const int64_t share =
      config.group_score == GroupScore::kTop2 ? 2 : config.top_k / config.group_top_k;
  std::vector<double> scores;
  for (int64_t g = 0; g < config.num_groups; ++g) {
    std::vector<double> members(biased.begin() + g * size, biased.begin() + (g + 1) * size);
    std::sort(members.rbegin(), members.rend());
    members.resize(static_cast<size_t>(std::min(share, size)));
    scores.push_back(std::accumulate(members.begin(), members.end(), 0.0));
  }
  return scores;
}

// The experts of the best groups, best first.
std::vector<int64_t> candidates(const RouterConfig& config, const std::vector<double>& biased) {
  std::vector<int64_t> groups = ranked(group_scores(config, biased));
  groups.resize(static_cast<size_t>(config.group_top_k));
  std::vector<int64_t> experts;
  for (const int64_t e : ranked(biased)) {
    const int64_t group = e / (config.num_experts / config.num_groups);
    if (std::find(groups.begin(), groups.end(), group) != groups.end()) experts.push_back(e);
  }
  return experts;
}

// [E] the scores of a token by which experts are selected.
std::vector<double> biased_scores(const RouterInput& input, const Row& scores) {
  std::vector<double> biased;
  for (size_t e = 0; e < scores.size(); ++e) {
    biased.push_back(scores[e].value + (input.expert_bias.empty() ? 0.0 : input.expert_bias[e]));
  }
  return biased;
}

// The smallest relative difference between neighbours among the first `count` + 1 values.
double smallest_gap(const std::vector<double>& values, const std::vector<int64_t>& order,
                    int64_t count) {
  double smallest = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count && i + 1 < std::ssize(order); ++i) {
    const double a = values[static_cast<size_t>(order[static_cast<size_t>(i)])];
    const double b = values[static_cast<size_t>(order[static_cast<size_t>(i + 1)])];
    smallest = std::min(smallest, std::abs(a - b) / (0.1 + std::max(std::abs(a), std::abs(b))));
  }
  return smallest;
}

uint64_t splitmix64(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15U;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

// [E]
Row row_of_logits(const RouterResult& result, int64_t t, int64_t E) {
  Row logits;
  for (int64_t e = 0; e < E; ++e) {
    logits.push_back({result.logits[static_cast<size_t>(t * E + e)], 0.0});
  }
  return logits;
}

bool is_padding(const RouterInput& input, int64_t t) {
  return !input.mask.empty() && input.mask[static_cast<size_t>(t)] != 0;
}

int64_t sequence_of(const RouterInput& input, int64_t t) {
  const bool is_one =
      input.sequence_ids.empty() || input.config.aux_loss_scope != BalanceScope::kSequence;
  return is_one ? 0 : input.sequence_ids[static_cast<size_t>(t)];
}

int64_t num_sequences_of(const RouterInput& input) {
  return input.config.aux_loss_scope == BalanceScope::kSequence ? input.num_sequences : 1;
}

// The logits of one token, and their sums. Along one logit, only the terms of that expert have a
// slope, so a derivative reuses the sums of the values: K steps, not E.
struct TokenLogits {
  const double* values;  // [E]
  double shift;          // the largest
  double exps;           // sum of exp(logit - shift)
  double shares;         // sum of the shares in the auxiliary loss: scores, or the exps
  double balance;        // the same, each times the routes to its expert
};

Dual share_of(Score kind, Dual logit, double shift) {
  return is_sigmoid_kind(kind) ? score_of(kind, logit) : exp(logit - shift);
}

TokenLogits logits_of(const RouterInput& input, const RouterResult& result,
                      const RouterCounts& counts, int64_t t) {
  const int64_t E = input.config.num_experts;
  const double* values = result.logits.data() + t * E;
  TokenLogits logits{values, *std::max_element(values, values + E), 0.0, 0.0, 0.0};
  for (int64_t e = 0; e < E; ++e) {
    const auto at = static_cast<size_t>(sequence_of(input, t) * E + e);
    const double share = share_of(input.config.score, {values[e], 0.0}, logits.shift).value;
    logits.exps += std::exp(values[e] - logits.shift);
    logits.shares += share;
    logits.balance += share * static_cast<double>(counts.routes_per_expert[at]);
  }
  return logits;
}

// [K] weights of one token, along logit `direction`.
Row weights_along(const RouterConfig& config, const TokenLogits& logits, const int64_t* ids,
                  int64_t direction) {
  const auto logit = [&](int64_t e) { return Dual{logits.values[e], e == direction ? 1.0 : 0.0}; };
  const Dual exps{logits.exps, exp(logit(direction) - logits.shift).slope};
  Row chosen;
  for (int64_t k = 0; k < config.top_k; ++k) {
    if (ids[k] < 0) continue;
    if (config.score == Score::kSoftmax) {
      chosen.push_back(exp(logit(ids[k]) - logits.shift) / exps);
    } else if (config.score == Score::kSoftmaxAfterTopK) {
      chosen.push_back(logit(ids[k]));
    } else {
      chosen.push_back(score_of(config.score, logit(ids[k])));
    }
  }
  return weights_of(config, chosen, ids);
}

// The contribution of token t to the two losses, along logit `direction`.
struct TokenLoss {
  Dual aux;
  Dual z;
};

TokenLoss loss_of_token(const RouterInput& input, const RouterCounts& counts, int64_t t,
                        const TokenLogits& logits, int64_t direction) {
  const RouterConfig& config = input.config;
  const auto b = static_cast<size_t>(sequence_of(input, t));
  const auto E = static_cast<double>(config.num_experts);
  const auto tokens = static_cast<double>(counts.num_tokens[b]);
  double sequences = counts.total_sequences;
  int64_t all_tokens = counts.total_tokens;
  if (sequences == 0.0) {
    sequences = static_cast<double>(std::count_if(
        counts.num_tokens.begin(), counts.num_tokens.end(), [](int64_t n) { return n > 0; }));
  }
  if (config.aux_loss_scope != BalanceScope::kSequence) sequences = 1.0;
  if (all_tokens == 0) {
    all_tokens = std::accumulate(counts.num_tokens.begin(), counts.num_tokens.end(), int64_t{0});
  }
  const Dual logit{logits.values[direction], 1.0};
  const double share_slope = share_of(config.score, logit, logits.shift).slope;
  const int64_t routes = counts.routes_per_expert[b * static_cast<size_t>(config.num_experts) +
                                                  static_cast<size_t>(direction)];
  const Dual shares{logits.shares + (is_sigmoid_kind(config.score) ? 1e-20 : 0.0), share_slope};
  const Dual balance = Dual{logits.balance, share_slope * static_cast<double>(routes)} / shares;
  const Dual lse = log({logits.exps, exp(logit - logits.shift).slope}) + logits.shift;
  return {balance * (config.aux_loss_coeff * E /
                     (static_cast<double>(config.top_k) * tokens * tokens *
                      static_cast<double>(sequences))),
          lse * lse * (config.z_loss_coeff / static_cast<double>(all_tokens))};
}

}  // namespace

RouterCounts global_batch_counts(const std::vector<std::vector<RouterCounts>>& micro_batches) {
  RouterCounts sum{.routes_per_expert = {}, .num_tokens = {0}};
  for (const std::vector<RouterCounts>& ranks : micro_batches) {
    sum.total_tokens = 0;
    for (const RouterCounts& rank : ranks) {
      sum.routes_per_expert.resize(rank.routes_per_expert.size());
      for (size_t e = 0; e < rank.routes_per_expert.size(); ++e) {
        sum.routes_per_expert[e] += rank.routes_per_expert[e];
      }
      sum.num_tokens[0] += rank.num_tokens[0];
      sum.total_tokens += rank.num_tokens[0];
    }
  }
  return sum;
}

RouterResult route(const RouterInput& input) {
  const RouterConfig& config = input.config;
  const int64_t E = config.num_experts;
  const int64_t K = config.top_k;
  RouterResult result;
  result.logits.assign(static_cast<size_t>(input.T * E), 0.0);
  result.expert_ids.assign(static_cast<size_t>(input.T * K), -1);
  result.weights.assign(static_cast<size_t>(input.T * K), 0.0);
  const int64_t B = num_sequences_of(input);
  result.counts.routes_per_expert.assign(static_cast<size_t>(B * E), 0);
  result.counts.num_tokens.assign(static_cast<size_t>(B), 0);
  for (int64_t t = 0; t < input.T; ++t) {
    if (is_padding(input, t)) continue;
    for (int64_t e = 0; e < E; ++e) {
      double logit = input.gate_bias.empty() ? 0.0 : input.gate_bias[static_cast<size_t>(e)];
      for (int64_t d = 0; d < config.width; ++d) {
        logit += input.x[static_cast<size_t>(t * config.width + d)] *
                 input.gate[static_cast<size_t>(e * config.width + d)];
      }
      result.logits[static_cast<size_t>(t * E + e)] = logit;
    }
    const Row scores = scores_of(config.score, row_of_logits(result, t, E));
    int64_t* ids = result.expert_ids.data() + t * K;
    if (!input.forced_ids.empty()) {
      std::copy_n(input.forced_ids.begin() + t * K, K, ids);
    } else if (config.force_balance) {
      for (int64_t k = 0; k < K; ++k) ids[k] = (t * K + k) % E;
    } else {
      const std::vector<int64_t> best = candidates(config, biased_scores(input, scores));
      std::copy_n(best.begin(), K, ids);
    }
    Row taken;
    for (int64_t k = 0; k < K; ++k) {
      if (ids[k] >= 0) taken.push_back(scores[static_cast<size_t>(ids[k])]);
    }
    const Row weights = weights_of(config, taken, ids);
    const int64_t b = sequence_of(input, t);
    ++result.counts.num_tokens[static_cast<size_t>(b)];
    for (int64_t k = 0; k < K; ++k) {
      result.weights[static_cast<size_t>(t * K + k)] = weights[static_cast<size_t>(k)].value;
      if (ids[k] >= 0) ++result.counts.routes_per_expert[static_cast<size_t>(b * E + ids[k])];
    }
  }
  return result;
}

double selection_margin(const RouterInput& input, const RouterResult& result) {
  const RouterConfig& config = input.config;
  double margin = std::numeric_limits<double>::infinity();
  if (!input.forced_ids.empty() || config.force_balance) return margin;
  for (int64_t t = 0; t < input.T; ++t) {
    if (is_padding(input, t)) continue;
    const Row scores = scores_of(config.score, row_of_logits(result, t, config.num_experts));
    const std::vector<double> biased = biased_scores(input, scores);
    margin = std::min(margin, smallest_gap(biased, candidates(config, biased), config.top_k));
    if (config.group_top_k == config.num_groups) continue;
    const std::vector<double> groups = group_scores(config, biased);
    margin = std::min(margin, smallest_gap(groups, ranked(groups), config.group_top_k));
  }
  return margin;
}

std::vector<double> jitter_factors(const RouterConfig& config, uint64_t seed,
                                   const std::vector<int64_t>& token_ids) {
  std::vector<double> factors;
  for (const int64_t token : token_ids) {
    const uint64_t key = splitmix64(splitmix64(seed) ^ static_cast<uint64_t>(token));
    for (int64_t d = 0; d < config.width; ++d) {
      const uint64_t bits = splitmix64(key + static_cast<uint64_t>(d)) >> 40;
      factors.push_back(1.0 + config.jitter * (static_cast<double>(bits) * 0x1p-23 - 1.0));
    }
  }
  return factors;
}

RouterLossValues router_losses(const RouterInput& input, const RouterResult& result,
                               const RouterCounts& counts) {
  RouterLossValues total;
  for (int64_t t = 0; t < input.T; ++t) {
    if (is_padding(input, t)) continue;
    const TokenLoss loss = loss_of_token(input, counts, t, logits_of(input, result, counts, t), 0);
    total.aux += loss.aux.value;
    total.z += loss.z.value;
  }
  return total;
}

RouterGradients route_backward(const RouterInput& input, const RouterResult& result,
                               const std::vector<double>& grad_weights, const RouterCounts& counts,
                               double grad_losses) {
  const RouterConfig& config = input.config;
  const int64_t E = config.num_experts;
  const int64_t K = config.top_k;
  const int64_t D = config.width;
  RouterGradients grads;
  grads.logits.assign(static_cast<size_t>(input.T * E), 0.0);
  grads.x.assign(static_cast<size_t>(input.T * D), 0.0);
  grads.gate.assign(static_cast<size_t>(E * D), 0.0);
  grads.gate_bias.assign(static_cast<size_t>(E), 0.0);
  for (int64_t t = 0; t < input.T; ++t) {
    if (is_padding(input, t)) continue;
    const TokenLogits logits = logits_of(input, result, counts, t);
    for (int64_t e = 0; e < E; ++e) {
      const Row weights = weights_along(config, logits, result.expert_ids.data() + t * K, e);
      const TokenLoss loss = loss_of_token(input, counts, t, logits, e);
      double slope = grad_losses * (loss.aux.slope + loss.z.slope);
      for (int64_t k = 0; k < K; ++k) {
        slope +=
            grad_weights[static_cast<size_t>(t * K + k)] * weights[static_cast<size_t>(k)].slope;
      }
      grads.logits[static_cast<size_t>(t * E + e)] = slope;
      grads.gate_bias[static_cast<size_t>(e)] += slope;
      for (int64_t d = 0; d < D; ++d) {
        const auto at_x = static_cast<size_t>(t * D + d);
        const auto at_gate = static_cast<size_t>(e * D + d);
        grads.x[at_x] += slope * input.gate[at_gate];
        grads.gate[at_gate] += slope * input.x[at_x];
      }
    }
  }
  return grads;
}

}  // namespace crossdock::reference
