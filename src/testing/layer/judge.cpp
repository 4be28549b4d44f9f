#include <algorithm>
#include <cmath>

#include "core/check.hpp"
#include "core/hash.hpp"
#include "crossdock/testing/comparator.hpp"
#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
namespace {

using reference::epsilon_of;
using Values = std::vector<double>;

// Sums are computed in fp32 (fp64 for fp64); results and hidden rows are rounded to the dtype.
double tolerance_of(const LayerSpec& spec) {
  const auto terms = static_cast<double>(spec.config.router.width + spec.config.experts.inner);
  return 8.0 * epsilon_of(spec.dtype()) + 16.0 * std::sqrt(terms) * epsilon_of(spec.sum_dtype());
}

// The largest magnitude of an array shows the size of the terms that its values are sums of, unless
// it has few values, in all of which terms may cancel. A term is a sum over D or F, and there is
// one for each token.
double term_size_of(const LayerSpec& spec) {
  double num_tokens = 1.0;
  for (const int64_t T : spec.tokens) num_tokens += static_cast<double>(T);
  const auto terms = static_cast<double>(spec.config.router.width + spec.config.experts.inner);
  return std::sqrt(terms * num_tokens);
}

constexpr size_t kFewValues = 16;

// The terms of a value in w1, w2 or b1 resemble those of its neighbours along F, so that they
// cancel together: these count as one value.
size_t num_independent(const LayerSpec& spec, std::string_view name, size_t num_values) {
  if (!name.ends_with("_w1") && !name.ends_with("_w2") && !name.ends_with("_b1")) return num_values;
  const bool is_shared = name.starts_with("grad_shared");
  const int64_t inner = is_shared ? spec.config.shared_inner : spec.config.experts.inner;
  return num_values / static_cast<size_t>(std::max<int64_t>(1, inner));
}

}  // namespace

Findings compare(const LayerWorld& world, int rank, const LayerResults& got,
                 const LayerResults& wanted) {
  Findings findings;
  LayerResults mine = got;
  LayerResults theirs = wanted;
  const auto parts = parts_of(theirs);
  for (size_t i = 0; const auto& [name, values] : parts_of(mine)) {
    const Values& expected = *parts[i++].second;
    const bool is_exact = name == "load" || name == "dropped" || name == "totals";
    // Values of tokens and parameters are near 1.
    const size_t num_values = num_independent(world.spec, name, expected.size());
    double scale = num_values < kFewValues ? term_size_of(world.spec) : 1.0;
    for (const double value : expected) scale = std::max(scale, std::abs(value));
    reference::Comparator comparator;
    comparator.near(concat("rank ", rank, ": ", name), *values, expected,
                    {.tolerance = is_exact ? 0.0 : tolerance_of(world.spec),
                     .scale = {scale},
                     .floor = is_exact ? 1e-9 : 0.0,
                     .dtype = DType::kF64});
    if (!comparator.passed()) findings.push_back(comparator.failure());
  }
  return findings;
}

std::vector<std::pair<std::string_view, Values*>> parts_of(LayerResults& results) {
  return {{"out", &results.out},
          {"grad_x", &results.grad_x},
          {"grad_gate", &results.grad_gate},
          {"grad_gate_bias", &results.grad_gate_bias},
          {"grad_w1", &results.grad_experts.w1},
          {"grad_w2", &results.grad_experts.w2},
          {"grad_b1", &results.grad_experts.b1},
          {"grad_b2", &results.grad_experts.b2},
          {"grad_shared_w1", &results.grad_shared.w1},
          {"grad_shared_w2", &results.grad_shared.w2},
          {"grad_shared_b1", &results.grad_shared.b1},
          {"grad_shared_b2", &results.grad_shared.b2},
          {"load", &results.load},
          {"dropped", &results.dropped},
          {"losses", &results.losses},
          {"totals", &results.totals}};
}

uint64_t hash_of(LayerResults results) {
  uint64_t hash = kHashStart;
  for (const auto& [name, values] : parts_of(results)) {
    hash = hash_bytes(std::as_bytes(std::span(*values)), hash);
  }
  return hash;
}

Findings judge(Group& group, const StrategyFactory& strategy, const LayerWorld& world,
               const TensorPlace& place) {
  const LayerResults got = run_layer(group, {.strategy = strategy()}, world, place);
  return compare(world, group.rank(), got,
                 expected_results(world)[static_cast<size_t>(group.rank())]);
}

}  // namespace crossdock::conformance
