#include "cost/binomial.hpp"

#include <algorithm>
#include <cmath>

namespace crossdock {
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
