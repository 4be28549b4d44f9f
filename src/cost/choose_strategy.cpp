#include <algorithm>
#include <array>
#include <iomanip>
#include <sstream>

#include "core/check.hpp"
#include "crossdock/planner.hpp"
#include "plan/config_check.hpp"

namespace crossdock {
namespace {

// Of two that are as good, the one that stands first.
constexpr std::array<std::string_view, 4> kPreferred = {"direct", "hierarchical", "alltoall",
                                                        "allgather"};
constexpr double kAsGood = 1.02;

const StrategyCost& find(std::span<const StrategyCost> costs, std::string_view name) {
  const auto found = std::find_if(costs.begin(), costs.end(),
                                  [&](const StrategyCost& cost) { return cost.name == name; });
  CROSSDOCK_ASSERT(found != costs.end());
  return *found;
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
  for (const StrategyCost& cost : costs) {
    const bool is_same =
        inputs.topology.num_nodes == 1 && best.name == "direct" && cost.name == "hierarchical";
    if (cost.name == best.name || is_same) continue;
    if (next == nullptr || cost.step_serial_s < next->step_serial_s) next = &cost;
  }
  std::string text = "dispatch sends " + rows_per_token(inputs, best.dispatch) + "; " + next->name +
                     ", the next best, " + rows_per_token(inputs, next->dispatch);
  if (best.step_serial_s > 0) {
    const double ratio = next->step_serial_s / best.step_serial_s;
    text += " and takes " +
            (ratio < kAsGood ? "as long" : rounded(ratio) + " times as long, copies included");
  }
  if (inputs.topology.num_nodes == 1 && best.name == "direct") {
    text += "; hierarchical is the same thing inside one node";
  }
  return text;
}

}  // namespace

StrategyChoice choose_strategy(const CostInputs& inputs, std::span<const StrategyCost> costs) {
  const auto limit = static_cast<double>(inputs.fabric.memory_bytes);
  const auto fits = [&](const StrategyCost& cost) {
    return limit == 0 || cost.memory.expected.total() <= limit;
  };
  const bool any_fits = std::any_of(costs.begin(), costs.end(), fits);
  const StrategyCost* best = nullptr;
  for (const std::string_view name : kPreferred) {
    const StrategyCost& cost = find(costs, name);
    if (any_fits && !fits(cost)) continue;
    if (best == nullptr || cost.step_serial_s * kAsGood < best->step_serial_s) best = &cost;
  }
  return {.name = best->name, .reason = reason_for(inputs, costs, *best)};
}

std::string resolve_strategy(std::string_view name, const DispatchConfig& config,
                             const Topology& topology) {
  if (name != "auto") return std::string(name);
  CostInputs inputs{.config = config, .topology = topology, .tokens = 4096};
  inputs.fabric.memory_bytes = 0;  // the number of tokens is not known yet
  return choose_strategy(inputs, estimate_costs(inputs).strategies).name;
}

}  // namespace crossdock
