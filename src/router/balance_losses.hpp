#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/router.hpp"

namespace crossdock::router {

/// An auxiliary loss: share s_te of token t in sequence b contributes
/// factors[row] * routes[row * E + e], with row = b for the loss per sequence, otherwise 0.
struct AuxLoss {
  BalanceScope scope = BalanceScope::kBatch;
  std::vector<double> factors;  // [B or 1]
  std::vector<int64_t> routes;  // [B or 1, E]

  size_t row_of(int32_t sequence) const {
    return scope == BalanceScope::kSequence ? static_cast<size_t>(sequence) : 0;
  }
};

/// The losses with a nonzero coefficient, by scope.
struct BalanceLosses {
  std::vector<AuxLoss> aux;
  double z_factor = 0.0;  // factor on logsumexp^2 of a token
};

/// For counts in host memory.
BalanceLosses balance_losses(const RouterConfig& config, const RouterOutput& output,
                             const LossCounts& counts);

/// The counts that a loss uses: those in `counts` if given, otherwise this rank's own.
const RouterStatistics& counts_of(BalanceScope scope, const RouterOutput& output,
                                  const LossCounts& counts);

/// Throws Error(kInvalidArgument) if the counts do not match the router and its output.
void check_counts(const RouterConfig& config, const RouterOutput& output, const LossCounts& counts);

/// a + b. Throws Error(kInvalidArgument) if the sum overflows.
int64_t add_counts(int64_t a, int64_t b);

/// Throws Error(kInvalidArgument) if two statistics of a router cannot be added.
void check_summable(const RouterConfig& config, const RouterStatistics& a,
                    const RouterStatistics& b);

}  // namespace crossdock::router
