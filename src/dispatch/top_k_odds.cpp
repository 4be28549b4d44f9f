#include "dispatch/top_k_odds.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <utility>

namespace crossdock {
namespace {

// Experts in disjoint sets: one each, those of a rank, those of a node.
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

// Probability that K of E experts, all alike, contain one of a set: 1 - C(E - n, K) / C(E, K).
std::vector<double> uniform_hits(const ExpertSets& sets, int64_t E, int64_t K) {
  std::map<int64_t, double> hit_of_size;
  std::vector<double> hits;
  for (size_t set = 0; set < sets.size(); ++set) {
    const int64_t size = sets.offsets[set + 1] - sets.offsets[set];
    const auto [entry, is_new] = hit_of_size.try_emplace(size, 0.0);
    if (is_new) {
      double miss = 1.0;
      for (int64_t i = 0; i < K && miss > 0; ++i) {
        miss *=
            static_cast<double>(std::max<int64_t>(E - size - i, 0)) / static_cast<double>(E - i);
      }
      entry->second = 1.0 - miss;
    }
    hits.push_back(entry->second);
  }
  return hits;
}

// Drawing without replacement is a race: expert e arrives at a time with the rate p_e, and the
// first K to arrive are drawn. By the time t each has arrived with the probability 1 - exp(-p_e t),
// independently of the others, so the number of arrivals has the generating polynomial
// prod_e (exp(-p_e t) + (1 - exp(-p_e t)) z). A set is hit if its first arrival, which has the rate
// of the set, comes while fewer than K others have arrived:
//   hit(A) = integral over t of rate(A) exp(-rate(A) t) P(fewer than K arrivals outside A).
class Race {
 public:
  Race(std::vector<double> rates, int64_t top_k)
      : rates_(std::move(rates)),
        K_(static_cast<size_t>(top_k)),
        present_(rates_.size()),
        absent_(rates_.size()) {}

  std::vector<double> hits(const ExpertSets& sets) {
    std::vector<double> set_rates(sets.size(), 0.0);
    for (size_t set = 0; set < sets.size(); ++set) {
      for (const int32_t e : members(sets, set)) set_rates[set] += rates_[static_cast<size_t>(e)];
    }
    // t = exp(x - exp(-x)) turns the integral into one over the whole line whose integrand falls
    // off doubly exponentially on the left; equal steps then converge exponentially. The K-th
    // arrival is a peak of width 1 / sqrt(K) in x.
    const double step = std::min(0.1, 0.7 / std::sqrt(static_cast<double>(K_)));
    std::vector<double> hits(sets.size(), 0.0);
    std::vector<double> few(sets.size());
    for (double x = -3.7;; x += step) {
      const double t = std::exp(x - std::exp(-x));
      const double weight = step * t * (1.0 + std::exp(-x));
      few_arrivals_outside(sets, t, few);
      double largest = 0.0;  // share of this step in any sum
      for (size_t set = 0; set < sets.size(); ++set) {
        if (set_rates[set] == 0.0) continue;
        const double part = weight * set_rates[set] * std::exp(-set_rates[set] * t) * few[set];
        hits[set] += part;
        if (hits[set] > 0.0) largest = std::max(largest, part / hits[set]);
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

  // The polynomial times the factors of a set, without powers of K and above.
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

  // few[set] = probability of fewer than K arrivals by t among the experts outside the set: the
  // product of the factors before the set and of those behind it.
  void few_arrivals_outside(const ExpertSets& sets, double t, std::vector<double>& few) {
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
      double at_most = 0.0;  // of behind_: arrivals up to i
      few[set] = 0.0;
      for (size_t i = 0; i < K_; ++i) {
        at_most += behind_[(set + 1) * K_ + i];
        few[set] += before_[K_ - 1 - i] * at_most;
      }
      multiply(members(sets, set), before_.data());
    }
  }

  std::vector<double> rates_;
  size_t K_;
  std::vector<double> present_;  // [E] probability of an arrival by t
  std::vector<double> absent_;   // [E]
  std::vector<double> before_;   // [K]
  std::vector<double> behind_;   // [sets + 1, K]
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

}  // namespace

TokenSpread expected_spread(const Placement& placement, const Topology& topology,
                            const TopKDraw& draw) {
  const size_t E = placement.owner.size();
  const auto K = draw.top_k;
  const ExpertSets by_rank{.experts = placement.experts_by_owner,
                           .offsets = placement.owner_offsets};
  const ExpertSets by_node = sets_by_node(placement, topology);
  TokenSpread spread;
  std::vector<double> hits_of_expert;
  if (draw.zipf == 0.0 || K == static_cast<int64_t>(E)) {
    hits_of_expert.assign(E, static_cast<double>(K) / static_cast<double>(E));
    spread.reaches_rank = uniform_hits(by_rank, static_cast<int64_t>(E), K);
    spread.reaches_node = uniform_hits(by_node, static_cast<int64_t>(E), K);
  } else {
    Race race(zipf_rates(E, draw.zipf), K);
    hits_of_expert = race.hits(sets_of_one(E));
    spread.reaches_rank = race.hits(by_rank);
    spread.reaches_node = race.hits(by_node);
  }
  spread.routes_to_rank.assign(topology.node_of_rank.size(), 0.0);
  for (size_t e = 0; e < E; ++e) {
    spread.routes_to_rank[static_cast<size_t>(placement.owner[e])] += hits_of_expert[e];
  }
  return spread;
}

}  // namespace crossdock
