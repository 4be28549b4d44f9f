#pragma once

#include <cstdint>

namespace crossdock {

/// N is the number of successes in n independent trials of probability p. Both functions take time
/// proportional to the standard deviation of N.

/// Probability of N <= k.
double binomial_at_most(int64_t n, double p, int64_t k);

/// Expectation of min(N, limit): what a capacity of `limit` keeps. REQUIRES limit >= 0.
double binomial_limited_mean(int64_t n, double p, int64_t limit);

}  // namespace crossdock
