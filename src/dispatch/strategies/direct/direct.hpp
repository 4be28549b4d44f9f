#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "crossdock/extend/strategy.hpp"
#include "crossdock/extend/strategy_model.hpp"
#include "dispatch/path.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock {

namespace cuda {
struct Packing;
/// What direct and hierarchical exchange between the nodes of GPUs.
Packing relay_packing();
/// For direct and hierarchical. sums_per_rank: partial sums are made per rank, otherwise per node.
std::unique_ptr<Path> make_direct_path(const PathContext& context, int device, bool sums_per_rank);
}  // namespace cuda

/// How a strategy that reaches near ranks directly handles far ranks.
struct DirectVariant {
  std::string_view name;  // static lifetime
  /// The ranks through which copies reach far ranks.
  Gateway (*make_gateway)(const Topology& topology);
  /// With partial sums: the sum group of a rank; a token's rows in one group are summed first.
  int (*sum_group_of)(const Topology& topology, int rank);
  std::unique_ptr<Path> (*make_device_path)(const PathContext& context, Device device);
  const StrategyModel& model;  // static lifetime
};
std::unique_ptr<Strategy> make_direct_variant(const DirectVariant& variant);

/// The copies between nodes, kept in the plans of such a strategy.
const Relay& relay_of(const Plan& plan);
/// How a source adds up its tokens. REQUIRES: the plan has partial sums.
const SourcePartials& partials_of(const Plan& plan);

/// The model of strategies that store to near ranks directly and send copies to far ranks in rounds
/// (relay.hpp). The derived class says where copies go.
class RelayModel : public StrategyModel {
 public:
  bool reaches_peers() const override { return true; }
  double memory_traffic(Movement movement, const StepSizes& sizes,
                        const StrategyJob& job) const override;
  MessageModel messages(Movement movement, double row_bytes, const StrategyJob& job) const override;
  void trace_plan(const StepSizes& sizes, const StrategyJob& job,
                  MemoryTrace& trace) const override;
  void trace_rows(Movement movement, double row_bytes, const StepSizes& sizes,
                  const StrategyJob& job, MemoryTrace& trace) const override;

 protected:
  virtual const CopySizes& copies(const StepSizes& sizes) const = 0;
  /// MessageModel::rows_per_token: routes in a combine, otherwise copies.
  virtual std::vector<double> rows_per_token(Movement movement, const StrategyJob& job) const = 0;
};

/// The flow of routes within nodes and of copies between nodes.
LinkFlow flow_with_copies(const LinkFlow& routes, const LinkFlow& copies);

}  // namespace crossdock
