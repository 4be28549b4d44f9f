#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/extend/strategy_model.hpp"
#include "crossdock/planner.hpp"
#include "plan/placement.hpp"

namespace crossdock {

/// Computes once what depends only on the inputs, and from that the costs of strategies. REQUIRES:
/// checked inputs (check_cost_inputs).
class CostModel {
 public:
  explicit CostModel(CostInputs inputs);

  /// Throws Error(kInvalidArgument) if the strategy's model gives vectors of a wrong size.
  StrategyCost cost_of(const Strategy& strategy) const;
  OperationCost least_dispatch() const;
  RoutingEstimate routing() const;

  /// Whether the expected memory of any candidate fits the fabric's with this many tokens per rank;
  /// the model keeps this number of tokens. With a capacity, the share of kept routes stays that of
  /// the number of tokens that the model was made with.
  bool fits(int64_t tokens, const StrategyList& candidates);

 private:
  int num_ranks() const { return static_cast<int>(inputs_.topology.node_of_rank.size()); }
  StrategyJob job() const;
  bool joins_rows(const StrategyModel& model, Movement movement) const;
  OperationCost operation(const Strategy& strategy, Movement movement) const;
  void add_requests(const Strategy& strategy, Movement movement, double row_bytes,
                    OperationCost& cost) const;
  double count_messages(const std::vector<double>& rows_per_token, bool far_only, double row_bytes,
                        double rounds) const;
  StepMemory memory(const StrategyModel& model) const;
  size_t fullest_rank() const;
  size_t largest_rank() const;

  CostInputs inputs_;
  Placement placement_;
  TokenSpread spread_;
  RouteSums sums_;
  RowBytes bytes_;
  std::vector<double> ranks_outside_;  // [nodes] ranks of other nodes
  StepSizes expected_;                 // of the fullest rank
};

/// Largest number of tokens per rank that costs are computed for.
inline constexpr int64_t kMaxTokens = int64_t{1} << 31;

/// Throws an Error(kInvalidArgument) that names the rule that the cost model's inputs break. The
/// costs of valid inputs are finite and not negative.
void check_cost_inputs(const CostInputs& inputs);

}  // namespace crossdock
