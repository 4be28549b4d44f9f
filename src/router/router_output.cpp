// Results of a router; copying them from a GPU to the host.
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "core/check.hpp"
#include "crossdock/router.hpp"
#include "router/backend.hpp"

namespace crossdock {
namespace {

void require_host_counts(const RouterStatistics& statistics, const char* instead) {
  CROSSDOCK_CHECK(!statistics.is_on_device(), "the statistics are on a GPU; use ", instead);
}

}  // namespace

RouterStatistics RouterStatistics::on_host(Stream stream) const {
  if (!is_on_device()) return *this;
  std::vector<int64_t> counts(static_cast<size_t>(device_counts.view.num_elements()));
  router::read_device(device_counts.view, std::as_writable_bytes(std::span(counts)), stream);
  const auto tokens = counts.end() - num_sequences;
  return {.num_sequences = num_sequences,
          .routes_per_expert = {counts.begin(), tokens},
          .num_tokens = {tokens, counts.end()}};
}

std::vector<int64_t> RouterStatistics::load() const {
  require_host_counts(*this, "on_host().load()");
  const auto num_counts = std::ssize(routes_per_expert);
  CROSSDOCK_CHECK(num_counts == 0 || (num_sequences >= 1 && num_counts % num_sequences == 0),
                  "routes_per_expert must be [num_sequences (", num_sequences, "), E], got ",
                  num_counts, " values");
  const size_t E =
      routes_per_expert.size() / static_cast<size_t>(std::max<int64_t>(num_sequences, 1));
  std::vector<int64_t> sums(E, 0);
  for (size_t begin = 0; begin < routes_per_expert.size(); begin += E) {
    for (size_t e = 0; e < E; ++e) sums[e] += routes_per_expert[begin + e];
  }
  return sums;
}

void RouterStatistics::add(const RouterStatistics& other) {
  require_host_counts(*this, "Router::sum");
  require_host_counts(other, "Router::sum");
  CROSSDOCK_CHECK(num_sequences == other.num_sequences &&
                      routes_per_expert.size() == other.routes_per_expert.size() &&
                      num_tokens.size() == other.num_tokens.size(),
                  "statistics to be added must have the same sequences and experts; got ",
                  num_sequences, " and ", other.num_sequences, " sequences");
  for (size_t i = 0; i < routes_per_expert.size(); ++i) {
    routes_per_expert[i] += other.routes_per_expert[i];
  }
  for (size_t i = 0; i < num_tokens.size(); ++i) num_tokens[i] += other.num_tokens[i];
}

Routing RouterOutput::routing() const& {
  return {.expert_ids = expert_ids.view(DType::kI32, {T, K}),
          .weights = weights.view(weight_dtype, {T, K}),
          .mask = {}};
}

RouterLosses RouterLosses::on_host(Stream stream) const {
  if (!is_on_device()) return *this;
  std::array<double, 5> values{};
  router::read_device(device_values.view, std::as_writable_bytes(std::span(values)), stream);
  const auto [aux_sum, z_loss, batch, sequence, global_batch] = values;
  return {.aux = aux_sum,
          .z = z_loss,
          .aux_terms = {.batch = batch, .sequence = sequence, .global_batch = global_batch}};
}

}  // namespace crossdock
