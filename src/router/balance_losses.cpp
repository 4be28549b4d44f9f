#include "router/balance_losses.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "core/check.hpp"
#include "core/tensor_check.hpp"

namespace crossdock::router {
namespace {

constexpr BalanceScope kScopes[] = {BalanceScope::kBatch, BalanceScope::kSequence,
                                    BalanceScope::kGlobalBatch};

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0}, add_counts);
}

AuxLoss aux_loss(const RouterConfig& config, BalanceScope scope, const RouterStatistics& statistics,
                 double total_sequences) {
  const bool by_sequence = scope == BalanceScope::kSequence;
  AuxLoss loss{.scope = scope, .factors = {}, .routes = {}};
  std::vector<int64_t> num_tokens = statistics.num_tokens;
  loss.routes = statistics.routes_per_expert;
  double num_sequences = 1.0;
  if (by_sequence) {
    num_sequences = static_cast<double>(std::count_if(num_tokens.begin(), num_tokens.end(),
                                                      [](int64_t count) { return count > 0; }));
    if (total_sequences > 0.0) num_sequences = total_sequences;
  } else if (statistics.num_sequences > 1) {
    num_tokens = {sum(num_tokens)};
    loss.routes = statistics.load();
  }
  const auto E = static_cast<double>(config.num_experts);
  const auto K = static_cast<double>(config.top_k);
  for (const int64_t count : num_tokens) {
    const auto tokens = static_cast<double>(count);
    loss.factors.push_back(
        count > 0 ? config.aux_coeff(scope) * E / (K * tokens * tokens * num_sequences) : 0.0);
  }
  return loss;
}

// Whether the arrays of the statistics have the sizes of B sequences and E experts.
bool has_sizes(const RouterStatistics& statistics, int64_t E) {
  const int64_t B = statistics.num_sequences;
  if (statistics.is_on_device()) {
    const ConstTensorView counts = statistics.device_counts.view;
    return counts.dtype == DType::kI64 && B >= 0 && B <= counts.num_elements() &&
           counts.shape == Shape{B * E + B};
  }
  return std::ssize(statistics.num_tokens) == B &&
         std::ssize(statistics.routes_per_expert) == B * E;
}

std::string place_of(const RouterStatistics& statistics) {
  return describe(statistics.device_counts.view.device);
}

bool is_same_place(const RouterStatistics& a, const RouterStatistics& b) {
  return a.is_on_device() == b.is_on_device() &&
         a.device_counts.view.device == b.device_counts.view.device;
}

}  // namespace

int64_t add_counts(int64_t a, int64_t b) {
  int64_t sum = 0;
  CROSSDOCK_CHECK(!__builtin_add_overflow(a, b, &sum),
                  "counts of routes and tokens must sum to at most 2^63 - 1, got ", a, " and ", b);
  return sum;
}

const RouterStatistics& counts_of(BalanceScope scope, const RouterOutput& output,
                                  const LossCounts& counts) {
  const RouterStatistics* given = counts.of(scope);
  return given != nullptr ? *given : output.statistics;
}

BalanceLosses balance_losses(const RouterConfig& config, const RouterOutput& output,
                             const LossCounts& counts) {
  BalanceLosses losses;
  for (const BalanceScope scope : kScopes) {
    if (config.aux_coeff(scope) == 0.0) continue;
    losses.aux.push_back(
        aux_loss(config, scope, counts_of(scope, output, counts), counts.total_sequences));
  }
  const int64_t num_tokens = counts.total_tokens > 0
                                 ? counts.total_tokens
                                 : sum(counts_of(BalanceScope::kBatch, output, counts).num_tokens);
  if (num_tokens > 0) losses.z_factor = config.z_loss_coeff / static_cast<double>(num_tokens);
  return losses;
}

void check_counts(const RouterConfig& config, const RouterOutput& output,
                  const LossCounts& counts) {
  CROSSDOCK_CHECK(counts.total_sequences >= 0.0 && std::isfinite(counts.total_sequences),
                  "total_sequences must be finite and not negative, got ", counts.total_sequences);
  CROSSDOCK_CHECK(counts.total_tokens >= 0, "total_tokens must not be negative, got ",
                  counts.total_tokens);
  const int64_t own = output.statistics.num_sequences;
  for (const BalanceScope scope : kScopes) {
    const RouterStatistics* given = counts.of(scope);
    const bool is_for_z = scope == BalanceScope::kBatch && config.z_loss_coeff != 0.0;
    if (given == nullptr || !(config.counts(scope) || is_for_z)) continue;
    const int64_t B = given->num_sequences;
    const bool may_be_one = scope != BalanceScope::kSequence && B == 1;
    CROSSDOCK_CHECK((B == own || may_be_one) && has_sizes(*given, output.E),
                    "the summed statistics must have the same ", own, " sequences and ", output.E,
                    " experts as this rank's");
    CROSSDOCK_CHECK(is_same_place(*given, output.statistics),
                    "the summed statistics must be where this rank's are, ",
                    place_of(output.statistics), "; they are ", place_of(*given));
  }
}

void check_summable(const RouterConfig& config, const RouterStatistics& a,
                    const RouterStatistics& b) {
  const int64_t E = config.num_experts;
  CROSSDOCK_CHECK(a.num_sequences == b.num_sequences && has_sizes(a, E) && has_sizes(b, E),
                  "statistics to be added must have the same sequences and ", E, " experts; got ",
                  a.num_sequences, " and ", b.num_sequences, " sequences");
  CROSSDOCK_CHECK(is_same_place(a, b), "both statistics must be on the same device; one is ",
                  place_of(a), ", the other ", place_of(b));
}

}  // namespace crossdock::router
