#pragma once

#include <vector>

#include "crossdock/extend/strategy_model.hpp"

namespace crossdock {

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
