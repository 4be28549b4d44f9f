#include "layer/route_counts.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/check.hpp"

namespace crossdock {

// [B | routes B x E | tokens B]
std::vector<int64_t> pack(const RouterStatistics& statistics) {
  std::vector<int64_t> packed = {statistics.num_sequences};
  packed.insert(packed.end(), statistics.routes_per_expert.begin(),
                statistics.routes_per_expert.end());
  packed.insert(packed.end(), statistics.num_tokens.begin(), statistics.num_tokens.end());
  return packed;
}

RouterStatistics unpack(std::span<const std::byte> body) {
  std::vector<int64_t> packed(body.size() / sizeof(int64_t));
  CROSSDOCK_ASSERT(!packed.empty());
  std::memcpy(packed.data(), body.data(), packed.size() * sizeof(int64_t));
  RouterStatistics statistics;
  statistics.num_sequences = packed[0];
  const auto tokens = packed.end() - statistics.num_sequences;
  statistics.routes_per_expert.assign(packed.begin() + 1, tokens);
  statistics.num_tokens.assign(tokens, packed.end());
  return statistics;
}

std::vector<RouterStatistics> unpack_all(const Agreement& agreement, int num_ranks) {
  std::vector<RouterStatistics> all;
  all.reserve(static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) all.push_back(unpack(agreement.body(rank)));
  return all;
}

RouterStatistics sum(const std::vector<RouterStatistics>& statistics) {
  RouterStatistics total = statistics[0];
  for (size_t i = 1; i < statistics.size(); ++i) total.add(statistics[i]);
  return total;
}

int64_t num_tokens(const RouterStatistics& statistics) {
  return std::accumulate(statistics.num_tokens.begin(), statistics.num_tokens.end(), int64_t{0});
}

int64_t num_sequences_with_tokens(const RouterStatistics& statistics) {
  return std::count_if(statistics.num_tokens.begin(), statistics.num_tokens.end(),
                       [](int64_t tokens) { return tokens > 0; });
}

void check_earlier(const RouterConfig& config, const RouterStatistics* earlier) {
  if (earlier == nullptr) return;
  CROSSDOCK_CHECK(config.aux_loss_scope == BalanceScope::kGlobalBatch,
                  "earlier is for BalanceScope::kGlobalBatch; leave it out with other scopes");
  CROSSDOCK_CHECK(earlier->num_sequences == 1 && std::ssize(earlier->num_tokens) == 1 &&
                      std::ssize(earlier->routes_per_expert) == config.num_experts,
                  "earlier must be the statistics of an earlier micro-batch of this layer: ",
                  config.num_experts, " counts of routes and 1 of tokens, got ",
                  earlier->routes_per_expert.size(), " and ", earlier->num_tokens.size());
}

}  // namespace crossdock
