#include <algorithm>
#include <iomanip>
#include <sstream>

#include "core/check.hpp"
#include "cost/cost_model.hpp"
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

StrategyChoice resolve_strategy(std::string_view name, const DispatchConfig& config,
                                const Topology& topology, const StrategyList& candidates) {
  if (name != "auto") return {.name = std::string(name), .reason = "as given"};
  CostInputs inputs{.config = config, .topology = topology, .tokens = 4096};
  inputs.fabric.memory_bytes = 0;  // the number of tokens is not known yet
  return choose_strategy(inputs, estimate_costs(inputs, candidates).strategies);
}

namespace {

// The largest number of tokens, up to `most`, with which some candidate fits.
int64_t search_fitting_tokens(CostModel& model, const StrategyList& candidates, int64_t most) {
  if (model.fits(most, candidates)) return most;
  int64_t fitting = 0;
  int64_t too_many = most;
  while (too_many - fitting > 1) {
    const int64_t tokens = fitting + (too_many - fitting) / 2;
    (model.fits(tokens, candidates) ? fitting : too_many) = tokens;
  }
  return fitting;
}

}  // namespace

CostEstimate estimate_costs(const CostInputs& inputs, const StrategyList& candidates) {
  check_cost_inputs(inputs);
  CROSSDOCK_CHECK(candidates.begin() != candidates.end(),
                  "candidates must have at least one strategy, got none");
  const CostModel model(inputs);
  CostEstimate estimate;
  estimate.routing = model.routing();
  estimate.least_dispatch = model.least_dispatch();
  for (const auto& strategy : candidates) {
    estimate.strategies.push_back(model.cost_of(*strategy));
    estimate.strategies.back().preference = std::ssize(estimate.strategies) - 1;
  }
  std::sort(estimate.strategies.begin(), estimate.strategies.end(),
            [](const StrategyCost& a, const StrategyCost& b) { return a.name < b.name; });
  return estimate;
}

int64_t largest_fitting_tokens(const CostInputs& inputs, const StrategyList& candidates) {
  check_cost_inputs(inputs);
  CostInputs tried = inputs;
  CostModel model(tried);
  tried.tokens = search_fitting_tokens(model, candidates, inputs.tokens);
  if (!inputs.config.capacity || tried.tokens == inputs.tokens) return tried.tokens;
  // With fewer tokens a capacity drops a different share of the routes. Repeat the search with that
  // share until the number of tokens found agrees with it. The share hardly changes.
  constexpr int kMaxPasses = 32;
  int64_t largest = 0;
  for (int pass = 0; pass < kMaxPasses; ++pass) {
    model = CostModel(tried);
    const int64_t found = search_fitting_tokens(model, candidates, inputs.tokens);
    if (found >= tried.tokens) largest = std::max(largest, tried.tokens);
    if (found == tried.tokens) break;
    tried.tokens = found;
  }
  return largest;
}

}  // namespace crossdock
