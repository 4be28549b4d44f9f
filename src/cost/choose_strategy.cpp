#include <algorithm>
#include <iomanip>
#include <sstream>

#include "core/check.hpp"
#include "crossdock/planner.hpp"

namespace crossdock {
namespace {

// If two times differ by less than this factor, the earlier candidate is chosen.
constexpr double kTieFactor = 1.02;

std::vector<const StrategyCost*> by_preference(std::span<const StrategyCost> costs) {
  std::vector<const StrategyCost*> sorted;
  for (const StrategyCost& cost : costs) sorted.push_back(&cost);
  std::stable_sort(sorted.begin(), sorted.end(), [](const StrategyCost* a, const StrategyCost* b) {
    return a->preference < b->preference;
  });
  return sorted;
}

std::string rounded(double value) {
  std::ostringstream out;
  out << std::setprecision(3) << value;
  return out.str();
}

// "0.998 rows per token between nodes and 7.2 inside them"
std::string rows_per_token(const CostInputs& inputs, const OperationCost& cost) {
  const auto T = static_cast<double>(std::max<int64_t>(inputs.tokens, 1));
  std::string text;
  if (inputs.topology.num_nodes > 1) {
    text = rounded(cost.rows.between_nodes / T) + " rows per token between nodes and ";
  }
  return text + rounded(cost.rows.within_node / T) + " inside " +
         (inputs.topology.num_nodes > 1 ? "them" : "the node");
}

std::string reason_for(const CostInputs& inputs, std::span<const StrategyCost> costs,
                       const StrategyCost& best) {
  if (inputs.topology.node_of_rank.size() == 1) return "one rank: nothing travels";
  const StrategyCost* next = nullptr;
  std::string same;
  for (const StrategyCost& cost : costs) {
    if (cost.name == best.name) continue;
    if (cost.same_as == best.name) {
      same += "; " + cost.name + " is the same thing " +
              (inputs.topology.num_nodes == 1 ? "inside one node" : "on these nodes");
    } else if (next == nullptr || cost.step_serial_s < next->step_serial_s) {
      next = &cost;
    }
  }
  std::string text = "dispatch sends " + rows_per_token(inputs, best.dispatch);
  if (next != nullptr) {
    text += "; " + next->name + ", the next best, " + rows_per_token(inputs, next->dispatch);
  }
  if (next != nullptr && best.step_serial_s > 0) {
    const double ratio = next->step_serial_s / best.step_serial_s;
    text += " and takes " +
            (ratio < kTieFactor ? "as long" : rounded(ratio) + " times as long, copies included");
  }
  return text + same;
}

}  // namespace

StrategyChoice choose_strategy(const CostInputs& inputs, std::span<const StrategyCost> costs) {
  CROSSDOCK_CHECK(!costs.empty(), "there must be at least one strategy to choose from, got none");
  const auto limit = static_cast<double>(inputs.fabric.memory_bytes);
  const auto fits = [&](const StrategyCost& cost) {
    return limit == 0 || cost.memory.expected.total() <= limit;
  };
  const bool any_fits = std::any_of(costs.begin(), costs.end(), fits);
  const StrategyCost* best = nullptr;
  for (const StrategyCost* cost : by_preference(costs)) {
    if (any_fits && !fits(*cost)) continue;
    if (best == nullptr || cost->step_serial_s * kTieFactor < best->step_serial_s) best = cost;
  }
  return {.name = best->name, .reason = reason_for(inputs, costs, *best)};
}

std::string resolve_strategy(std::string_view name, const DispatchConfig& config,
                             const Topology& topology, const StrategyList& candidates) {
  if (name != "auto") return std::string(name);
  CostInputs inputs{.config = config, .topology = topology, .tokens = 4096};
  inputs.fabric.memory_bytes = 0;  // the number of tokens is not known yet
  return choose_strategy(inputs, estimate_costs(inputs, candidates).strategies).name;
}

}  // namespace crossdock
