#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/communicator.hpp"
#include "dispatch/placement.hpp"

namespace crossdock {

/// Where the K distinct experts of one token are, before the router has spoken: expectations.
struct TokenSpread {
  std::vector<double> routes_to_rank;  // [P] number of routes
  std::vector<double> reaches_rank;    // [P] probability of at least one route
  std::vector<double> reaches_node;    // [nodes] the same
};

/// The router draws K experts one after the other, each with a probability proportional to
/// (e + 1)^-zipf among those not drawn yet.
struct TopKDraw {
  int64_t top_k = 0;
  double zipf = 0;
};

inline constexpr double kMaxZipf = 10;
/// Largest top_k * num_experts with zipf > 0, where every expert costs top_k steps per node of the
/// quadrature.
inline constexpr int64_t kMaxSkewedSlots = int64_t{1} << 18;

/// zipf = 0, all experts alike: exact, by the hypergeometric formula. zipf > 0: an integral over
/// one variable, to about 1e-12.
TokenSpread expected_spread(const Placement& placement, const Topology& topology,
                            const TopKDraw& draw);

}  // namespace crossdock
