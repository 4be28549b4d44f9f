#pragma once

#include <memory>
#include <string_view>

#include "crossdock/extend/strategy.hpp"
#include "dispatch/path.hpp"
#include "dispatch/strategies/direct/relay.hpp"
#include "dispatch/strategies/direct/source_partials.hpp"

namespace crossdock {

namespace cuda {
struct Packing;
/// What direct and hierarchical exchange between the nodes of GPUs.
Packing relay_packing();
}  // namespace cuda

/// For direct and hierarchical. sums_per_rank: partial sums are made per rank, otherwise per node.
std::unique_ptr<Path> make_direct_device_path(const PathContext& context, Device device,
                                              bool sums_per_rank);

/// How a strategy that reaches near ranks directly handles far ranks.
struct DirectVariant {
  std::string_view name;  // static lifetime
  /// The ranks through which copies reach far ranks.
  Gateway (*make_gateway)(const Topology& topology);
  /// With partial sums: the sum group of a rank; a token's rows in one group are summed first.
  int (*sum_group_of)(const Topology& topology, int rank);
  const StrategyModel& model;  // static lifetime
};
std::unique_ptr<Strategy> make_direct_variant(const DirectVariant& variant);

/// The copies between nodes, kept in the plans of such a strategy.
const Relay& relay_of(const Plan& plan);
/// How a source adds up its tokens. REQUIRES: the plan has partial sums.
const SourcePartials& partials_of(const Plan& plan);

}  // namespace crossdock
