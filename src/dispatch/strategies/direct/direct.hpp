#pragma once

#include <memory>
#include <string_view>

#include "crossdock/extend/strategy.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock {

/// Every row is written straight into its final place in the receiver's memory, and read where it
/// lies on the way back. Between nodes a token crosses once per destination rank.
std::unique_ptr<Strategy> make_direct();

/// How strategies that reach near ranks directly differ from each other between nodes.
struct DirectVariant {
  std::string_view name;  // of a string that lives as long as the program
  /// The ranks through which copies reach far ranks.
  Gateway (*make_gateway)(const Topology& topology);
  /// Which ranks' rows of a token are summed together before the rest, with partial sums.
  int (*sum_group_of)(const Topology& topology, int rank);
  const StrategyModel& model;  // lives as long as the program
};
std::unique_ptr<Strategy> make_direct_variant(const DirectVariant& variant);

/// What such a strategy keeps in a plan of its own: the copies that cross between nodes.
const Relay& relay_of(const Plan& plan);

}  // namespace crossdock
