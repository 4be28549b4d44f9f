#pragma once

#include <cstdint>
#include <optional>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/extend/strategy_model.hpp"
#include "crossdock/plan.hpp"
#include "plan/placement.hpp"

namespace crossdock {

/// The router draws K experts one at a time, each with a probability proportional to (e + 1)^-zipf
/// among those not drawn yet.
struct TopKDraw {
  int64_t top_k = 0;
  double zipf = 0;
};

/// Every source keeps at most `capacity` routes to an expert.
struct Drops {
  int64_t tokens = 0;  // per source
  int64_t capacity = 0;
  DropPolicy policy = DropPolicy::kPosition;
};

inline constexpr double kMaxZipf = 10;

/// About how many multiplications expected_spread needs for its integrals: with zipf > 0 every
/// expert costs top_k of them per node of the quadrature. 0 if it needs no integral.
double draw_steps(int64_t num_experts, const TopKDraw& draw, bool with_drops);
/// Limit on draw_steps: this many take a few seconds.
inline constexpr double kMaxDrawSteps = 1.3e9;
/// Largest top_k * num_experts with zipf > 0, regardless of draw_steps.
inline constexpr int64_t kMaxSkewedSlots = int64_t{1} << 18;

/// zipf = 0, all experts equally likely: exact, by the hypergeometric formula. zipf > 0: an
/// integral over one variable, to about 1e-12.
///
/// With drops, only kept routes count, as a mean over a source's tokens. The number of routes is
/// exact for any policy: a source has a binomial number of them to an expert. For ranks and nodes,
/// the drops of one token's routes are assumed to be independent of each other, given the token's
/// position (kPosition: early tokens keep theirs), which is sampled.
TokenSpread expected_spread(const Placement& placement, const Topology& topology,
                            const TopKDraw& draw, const std::optional<Drops>& drops = {});

/// N is the number of successes in n independent trials of probability p. Both functions take time
/// proportional to the standard deviation of N.

/// Probability of N <= k.
double binomial_at_most(int64_t n, double p, int64_t k);

/// Expectation of min(N, limit): what a capacity of `limit` keeps. REQUIRES limit >= 0.
double binomial_limited_mean(int64_t n, double p, int64_t limit);

}  // namespace crossdock
