#include "cost/top_k_odds.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <span>
#include <utility>

namespace crossdock {
namespace {

// Disjoint sets of experts: single ones, those of each rank, or those of each node.
struct ExpertSets {
  std::vector<int32_t> experts;  // by set
  std::vector<int64_t> offsets;  // [sets + 1] into experts

  size_t size() const { return offsets.size() - 1; }
};

ExpertSets sets_of_one(size_t num_experts) {
  ExpertSets sets{.experts = {}, .offsets = {0}};
  for (size_t e = 0; e < num_experts; ++e) {
    sets.experts.push_back(static_cast<int32_t>(e));
    sets.offsets.push_back(std::ssize(sets.experts));
  }
  return sets;
}

ExpertSets sets_by_node(const Placement& placement, const Topology& topology) {
  std::vector<std::vector<int32_t>> experts(static_cast<size_t>(topology.num_nodes));
  for (size_t e = 0; e < placement.owner.size(); ++e) {
    const int node = topology.node_of_rank[static_cast<size_t>(placement.owner[e])];
    experts[static_cast<size_t>(node)].push_back(static_cast<int32_t>(e));
  }
  ExpertSets sets{.experts = {}, .offsets = {0}};
  for (const std::vector<int32_t>& of_node : experts) {
    sets.experts.insert(sets.experts.end(), of_node.begin(), of_node.end());
    sets.offsets.push_back(std::ssize(sets.experts));
  }
  return sets;
}

// K of E experts are drawn, all equally likely.
class UniformDraw {
 public:
  UniformDraw(int64_t num_experts, int64_t top_k) : E_(num_experts), K_(top_k) {}

  // Probability that any expert of a set is drawn and kept, if each drawn one is kept with the
  // probability `kept`; with kept = 1: 1 - C(E - n, K) / C(E, K).
  std::vector<double> hits(const ExpertSets& sets, double kept) {
    std::vector<double> hits;
    for (size_t set = 0; set < sets.size(); ++set) {
      const std::vector<double>& odds = odds_of_counts(sets.offsets[set + 1] - sets.offsets[set]);
      double miss = 0.0;
      for (size_t drawn = odds.size(); drawn-- > 0;) miss = miss * (1.0 - kept) + odds[drawn];
      hits.push_back(std::max(0.0, 1.0 - miss));
    }
    return hits;
  }

 private:
  // Probability of 0, 1, ... drawn experts of a set: hypergeometric. Terms are computed from their
  // neighbours, starting at the largest, so that none overflows.
  const std::vector<double>& odds_of_counts(int64_t set_size) {
    const auto [entry, is_new] = odds_.try_emplace(set_size);
    std::vector<double>& odds = entry->second;
    if (!is_new) return odds;
    const int64_t others = E_ - set_size;
    const int64_t least = std::max<int64_t>(0, K_ - others);
    const int64_t most = std::min(set_size, K_);
    // odds[j + 1] / odds[j]
    const auto ratio = [&](int64_t j) {
      return static_cast<double>(set_size - j) / static_cast<double>(j + 1) *
             (static_cast<double>(K_ - j) / static_cast<double>(others - K_ + j + 1));
    };
    const int64_t mode = std::clamp((set_size + 1) * (K_ + 1) / (E_ + 2), least, most);
    odds.assign(static_cast<size_t>(most) + 1, 0.0);
    const auto at = [&](int64_t j) -> double& { return odds[static_cast<size_t>(j)]; };
    at(mode) = 1.0;
    for (int64_t j = mode; j < most; ++j) at(j + 1) = at(j) * ratio(j);
    for (int64_t j = mode; j > least; --j) at(j - 1) = at(j) / ratio(j - 1);
    const double sum = std::accumulate(odds.begin(), odds.end(), 0.0);
    for (double& one : odds) one /= sum;
    return odds;
  }

  int64_t E_;
  int64_t K_;
  std::map<int64_t, std::vector<double>> odds_;  // by the size of a set
};

// Drawing without replacement is a race: expert e arrives after an exponential time with rate p_e,
// and the first K to arrive are drawn. By time t each has arrived with probability 1 - exp(-p_e t),
// independently of the others, so the number of arrivals has the generating polynomial
// prod_e (exp(-p_e t) + (1 - exp(-p_e t)) z). If each expert that is drawn is kept with a
// probability of its own, independently, a set is hit if its first kept arrival comes while fewer
// than K others have arrived, including those of the set that are not kept. The density of that
// arrival is a sum over the members e of the set, of kept_e p_e exp(-p_e t) times the product of
// the other members' factors exp(-p_f t) + (1 - kept_f) (1 - exp(-p_f t)) z.
class Race {
 public:
  Race(std::vector<double> rates, int64_t top_k)
      : rates_(std::move(rates)),
        K_(static_cast<size_t>(top_k)),
        present_(rates_.size()),
        absent_(rates_.size()) {}

  // Step of the integration variable. The K-th arrival is a peak of width 1 / sqrt(K).
  static double step_of(int64_t top_k) {
    return std::min(0.1, 0.7 / std::sqrt(static_cast<double>(top_k)));
  }
  static constexpr double kFirst = -3.7;

  // kept: [E].
  std::vector<double> hits(const ExpertSets& all_sets, std::span<const double> kept) {
    std::vector<size_t> places;  // indices of the sets that have members
    const ExpertSets sets = without_empty(all_sets, places);
    // t = exp(x - exp(-x)) turns the integral into one over the whole line whose integrand falls
    // off doubly exponentially on the left; equal steps then converge exponentially.
    const double step = step_of(static_cast<int64_t>(K_));
    std::vector<double> hits(all_sets.size(), 0.0);
    std::vector<double> density(sets.size());
    for (double x = kFirst;; x += step) {
      const double t = std::exp(x - std::exp(-x));
      const double weight = step * t * (1.0 + std::exp(-x));
      first_kept_arrivals(sets, t, kept, density);
      double largest = 0.0;  // share of this step in any sum
      for (size_t set = 0; set < sets.size(); ++set) {
        const double part = weight * density[set];
        double& hit = hits[places[set]];
        hit += part;
        if (hit > 0.0) largest = std::max(largest, part / hit);
      }
      if (t > 1.0 && largest < 1e-16) return hits;
    }
  }

 private:
  static std::span<const int32_t> members(const ExpertSets& sets, size_t set) {
    const auto first = static_cast<size_t>(sets.offsets[set]);
    return std::span(sets.experts)
        .subspan(first, static_cast<size_t>(sets.offsets[set + 1]) - first);
  }

  // The polynomial times the factors of a set, truncated below the power K.
  void multiply(std::span<const int32_t> experts, double* polynomial) const {
    for (const int32_t e : experts) {
      const double absent = absent_[static_cast<size_t>(e)];
      const double present = present_[static_cast<size_t>(e)];
      for (size_t i = K_ - 1; i > 0; --i) {
        polynomial[i] = polynomial[i] * absent + polynomial[i - 1] * present;
      }
      polynomial[0] *= absent;
    }
  }

  static ExpertSets without_empty(const ExpertSets& all, std::vector<size_t>& places) {
    ExpertSets sets{.experts = all.experts, .offsets = {0}};
    for (size_t set = 0; set < all.size(); ++set) {
      if (all.offsets[set + 1] == all.offsets[set]) continue;
      sets.offsets.push_back(all.offsets[set + 1]);
      places.push_back(set);
    }
    return sets;
  }

  // density[set] of the first kept arrival at t with fewer than K others before it: from the
  // product of the factors before the set, its own, and those after it.
  void first_kept_arrivals(const ExpertSets& sets, double t, std::span<const double> kept,
                           std::vector<double>& density) {
    for (size_t e = 0; e < rates_.size(); ++e) {
      absent_[e] = std::exp(-rates_[e] * t);
      present_[e] = -std::expm1(-rates_[e] * t);
    }
    behind_.assign((sets.size() + 1) * K_, 0.0);
    behind_[sets.size() * K_] = 1.0;
    for (size_t set = sets.size(); set-- > 0;) {
      std::copy_n(&behind_[(set + 1) * K_], K_, &behind_[set * K_]);
      multiply(members(sets, set), &behind_[set * K_]);
    }
    before_.assign(K_, 0.0);
    before_[0] = 1.0;
    for (size_t set = 0; set < sets.size(); ++set) {
      multiply_by_first_kept(members(sets, set), kept);
      double at_most = 0.0;  // of behind_: arrivals up to i
      density[set] = 0.0;
      for (size_t i = 0; i < K_; ++i) {
        at_most += behind_[(set + 1) * K_ + i];
        density[set] += arriving_[K_ - 1 - i] * at_most;
      }
      multiply(members(sets, set), before_.data());
    }
  }

  // arriving_ = before_ times the density of the set's first kept arrival.
  void multiply_by_first_kept(std::span<const int32_t> experts, std::span<const double> kept) {
    waiting_ = before_;  // no kept arrival among the members so far
    arriving_.assign(K_, 0.0);
    for (const int32_t expert : experts) {
      const auto e = static_cast<size_t>(expert);
      const double arrives = kept[e] * rates_[e] * absent_[e];
      const double dropped = (1.0 - kept[e]) * present_[e];
      for (size_t i = K_; i-- > 0;) {
        arriving_[i] = arriving_[i] * absent_[e] + waiting_[i] * arrives;
        waiting_[i] *= absent_[e];
        if (i == 0) continue;
        arriving_[i] += arriving_[i - 1] * dropped;
        waiting_[i] += waiting_[i - 1] * dropped;
      }
    }
  }

  std::vector<double> rates_;
  size_t K_;
  std::vector<double> present_;   // [E] probability of an arrival by t
  std::vector<double> absent_;    // [E]
  std::vector<double> before_;    // [K]
  std::vector<double> waiting_;   // [K]
  std::vector<double> arriving_;  // [K]
  std::vector<double> behind_;    // [sets + 1, K]
};

std::vector<double> zipf_rates(size_t num_experts, double exponent) {
  std::vector<double> rates;
  double sum = 0.0;
  for (size_t e = 0; e < num_experts; ++e) {
    rates.push_back(std::pow(static_cast<double>(e + 1), -exponent));
    sum += rates.back();
  }
  for (double& rate : rates) rate /= sum;
  return rates;
}

// Probability that an expert's route is kept, for a token with this many tokens before it.
std::vector<double> kept_at(const std::vector<double>& hits, int64_t tokens_before,
                            int64_t capacity) {
  std::vector<double> kept;
  for (size_t e = 0; e < hits.size(); ++e) {
    const bool is_known = e > 0 && hits[e] == hits[e - 1];
    kept.push_back(is_known ? kept.back() : binomial_at_most(tokens_before, hits[e], capacity - 1));
  }
  return kept;
}

// Mean number of routes to each expert that a token keeps.
std::vector<double> mean_kept(const std::vector<double>& hits, const Drops& drops) {
  std::vector<double> kept;
  for (size_t e = 0; e < hits.size(); ++e) {
    const bool is_known = e > 0 && hits[e] == hits[e - 1];
    kept.push_back(is_known ? kept.back()
                            : binomial_limited_mean(drops.tokens, hits[e], drops.capacity) /
                                  static_cast<double>(drops.tokens));
  }
  return kept;
}

// Fewer if a Race is expensive.
int64_t num_sampled_places(int64_t num_experts, const TopKDraw& draw) {
  const int64_t slots = draw.zipf > 0 ? draw.top_k * num_experts : 1;
  return std::clamp<int64_t>((int64_t{1} << 17) / slots, 4, 64);
}

// Equally frequent samples of the probability that a token's routes are kept, [E] each.
std::vector<std::vector<double>> sample_kept(const std::vector<double>& hits,
                                             const std::vector<double>& routes,
                                             const TopKDraw& draw, const Drops& drops) {
  if (drops.policy == DropPolicy::kWeight) {  // the same for every token
    std::vector<double> kept = routes;
    for (size_t e = 0; e < kept.size(); ++e)
      kept[e] = hits[e] > 0 ? std::min(1.0, kept[e] / hits[e]) : 1.0;
    return {kept};
  }
  const int64_t num_places = num_sampled_places(std::ssize(hits), draw);
  std::vector<std::vector<double>> samples;
  for (int64_t i = 0; i < num_places; ++i) {
    const double place = (static_cast<double>(i) + 0.5) / static_cast<double>(num_places);
    const auto before = static_cast<int64_t>(place * static_cast<double>(drops.tokens));
    samples.push_back(kept_at(hits, before, drops.capacity));
  }
  return samples;
}

void add_scaled(const std::vector<double>& term, double factor, std::vector<double>& sum) {
  sum.resize(term.size(), 0.0);
  for (size_t i = 0; i < term.size(); ++i) sum[i] += factor * term[i];
}

}  // namespace

double draw_steps(int64_t num_experts, const TopKDraw& draw, bool with_drops) {
  if (draw.zipf == 0.0 || draw.top_k == num_experts) return 0;
  const auto E = static_cast<double>(num_experts);
  // The last expert, with a rate of E^-zipf or less, has arrived by then.
  const double last = std::log(40.0) + (draw.zipf + 1) * std::log(E);
  const double nodes = (last - Race::kFirst) / Race::step_of(draw.top_k);
  const double races =
      with_drops ? 1.0 + 2.0 * static_cast<double>(num_sampled_places(num_experts, draw)) : 3.0;
  constexpr double kExponentials = 8;  // two of them for each expert and node
  return nodes * races * E * (static_cast<double>(draw.top_k) + kExponentials);
}

TokenSpread expected_spread(const Placement& placement, const Topology& topology,
                            const TopKDraw& draw, const std::optional<Drops>& drops) {
  const size_t E = placement.owner.size();
  const auto K = draw.top_k;
  const ExpertSets by_rank{.experts = placement.experts_by_owner,
                           .offsets = placement.owner_offsets};
  const ExpertSets by_node = sets_by_node(placement, topology);
  const bool is_uniform = draw.zipf == 0.0 || K == static_cast<int64_t>(E);
  UniformDraw uniform(static_cast<int64_t>(E), K);
  Race race(zipf_rates(E, draw.zipf), K);
  const auto hits = [&](const ExpertSets& sets, const std::vector<double>& kept) {
    return is_uniform ? uniform.hits(sets, kept[0]) : race.hits(sets, kept);
  };
  const std::vector<double> all(E, 1.0);
  const std::vector<double> hits_of_expert =
      is_uniform ? std::vector<double>(E, static_cast<double>(K) / static_cast<double>(E))
                 : race.hits(sets_of_one(E), all);
  std::vector<double> routes = hits_of_expert;
  std::vector<std::vector<double>> ways = {all};
  if (drops && drops->capacity < drops->tokens) {
    routes = mean_kept(hits_of_expert, *drops);
    ways = sample_kept(hits_of_expert, routes, draw, *drops);
  }
  TokenSpread spread;
  const double share = 1.0 / static_cast<double>(ways.size());
  for (const std::vector<double>& kept : ways) {
    add_scaled(hits(by_rank, kept), share, spread.reaches_rank);
    add_scaled(hits(by_node, kept), share, spread.reaches_node);
  }
  spread.routes_to_rank.assign(topology.node_of_rank.size(), 0.0);
  for (size_t e = 0; e < E; ++e) {
    spread.routes_to_rank[static_cast<size_t>(placement.owner[e])] += routes[e];
  }
  return spread;
}

namespace {

constexpr double kNegligible = 1e-18;  // relative to a sum

// The logarithm of n!. Not std::lgamma, which sets a global: a race if ranks are threads.
double log_factorial(double n) {
  int sign = 0;
  return lgamma_r(n + 1, &sign);
}

double probability_of(int64_t n, double p, int64_t k) {
  const auto N = static_cast<double>(n);
  const auto K = static_cast<double>(k);
  return std::exp(log_factorial(N) - log_factorial(K) - log_factorial(N - K) + K * std::log(p) +
                  (N - K) * std::log1p(-p));
}

// Sums over the tail that begins at `first`, away from the mean: of the probabilities, and of their
// products with the distance from `origin`.
struct Tail {
  double probability = 0;
  double distance = 0;
};

Tail tail_above(int64_t n, double p, int64_t first, int64_t origin) {
  Tail tail;
  double term = first <= n ? probability_of(n, p, first) : 0.0;
  for (int64_t j = first; j <= n && term > 0; ++j) {
    const double part = term * static_cast<double>(j - origin);
    tail.probability += term;
    tail.distance += part;
    if (part < kNegligible * tail.distance && term < kNegligible * tail.probability) break;
    term *= static_cast<double>(n - j) / static_cast<double>(j + 1) * p / (1 - p);
  }
  return tail;
}

Tail tail_below(int64_t n, double p, int64_t first, int64_t origin) {
  Tail tail;
  double term = first >= 0 ? probability_of(n, p, first) : 0.0;
  for (int64_t j = first; j >= 0 && term > 0; --j) {
    const double part = term * static_cast<double>(origin - j);
    tail.probability += term;
    tail.distance += part;
    if (part < kNegligible * tail.distance && term < kNegligible * tail.probability) break;
    term *= static_cast<double>(j) / static_cast<double>(n - j + 1) * (1 - p) / p;
  }
  return tail;
}

}  // namespace

double binomial_at_most(int64_t n, double p, int64_t k) {
  if (k < 0) return 0;
  if (k >= n || p <= 0) return 1;
  if (p >= 1) return 0;
  return static_cast<double>(k) < static_cast<double>(n) * p
             ? tail_below(n, p, k, k).probability
             : 1 - tail_above(n, p, k + 1, k).probability;
}

double binomial_limited_mean(int64_t n, double p, int64_t limit) {
  const double mean = static_cast<double>(n) * p;
  if (limit >= n || p <= 0) return mean;
  if (p >= 1) return static_cast<double>(limit);
  return static_cast<double>(limit) < mean
             ? static_cast<double>(limit) - tail_below(n, p, limit - 1, limit).distance
             : mean - tail_above(n, p, limit + 1, limit).distance;
}

}  // namespace crossdock
