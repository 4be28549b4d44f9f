#include <algorithm>

#include "core/check.hpp"
#include "cost/cost_check.hpp"
#include "cost/cost_model.hpp"
#include "crossdock/planner.hpp"

namespace crossdock {
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
