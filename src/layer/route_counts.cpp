#include "layer/route_counts.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"

namespace crossdock {
namespace {

// As the body of an agreement: [B | routes B x E | tokens B].
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

// [P]
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

}  // namespace

bool RouteCounts::counts_in_other_group() const {
  return counting_group_ != nullptr && counting_group_ != &group_;
}

// With BalanceScope::kSequence and no stated group, each rank has sequences of its own.
bool RouteCounts::counts_each_rank() const {
  return counting_group_ == nullptr && scope_ == BalanceScope::kSequence;
}

// Must be identical on the ranks that count together.
std::string RouteCounts::counts_text(const MoeForwardArgs& args) const {
  const bool by_sequence = scope_ == BalanceScope::kSequence;
  std::string text;
  if (by_sequence && !counts_each_rank()) text += concat(";num_sequences=", args.num_sequences);
  if (by_sequence) text += concat(";total_sequences=", args.total_sequences);
  const int64_t earlier = args.earlier != nullptr ? num_tokens(*args.earlier) : 0;
  return text + concat(";earlier_tokens=", earlier);
}

// The other ranks of the counting group are waiting in sum_over_other_group: a refusal in this
// group ends their call too. After a mismatch or a failure not all ranks of this group would join.
void RouteCounts::refuse_in_other_group(const MoeForwardArgs& args, const Error& refusal) {
  if (refusal.code() == ErrorCode::kMismatch || group_.is_poisoned()) return;
  refusal_of([&] {
    counting_group_->agree(
        {.operation = "count", .config = counts_text(args), .body = {}, .refusal = &refusal});
  });
}

// The ranks of this group may belong to different counting groups: one that fails to count tells
// all of them.
RouterStatistics RouteCounts::sum_over_other_group(const MoeForwardArgs& args,
                                                   const RouterStatistics& own) {
  RouterStatistics total;
  const std::optional<Error> refusal = refusal_of([&] {
    const std::vector<int64_t> packed = pack(own);
    const Agreement agreement = counting_group_->agree({.operation = "count",
                                                        .config = counts_text(args),
                                                        .body = std::as_bytes(std::span(packed))});
    total = sum(unpack_all(agreement, counting_group_->size()));
  });
  group_.agree(
      {.operation = "counted", .config = {}, .body = {}, .refusal = refusal ? &*refusal : nullptr});
  return total;
}

void RouteCounts::agree(const MoeForwardArgs& args, const std::string& config_text,
                        std::optional<Error> refusal, MoeDecision& decision) {
  std::vector<int64_t> packed;
  if (!refusal) refusal = refusal_of([&] { packed = pack(decision.router->statistics); });
  Agreement agreement;
  try {
    agreement = group_.agree(
        {.operation = "route",
         .config = concat(config_text, counts_in_other_group() ? "" : counts_text(args)),
         .body = std::as_bytes(std::span(packed)),
         .refusal = refusal ? &*refusal : nullptr});
  } catch (const Error& error) {
    if (counts_in_other_group()) refuse_in_other_group(args, error);
    throw;
  }

  const RouterStatistics& own = decision.router->statistics;
  std::vector<RouterStatistics> ranks;
  run_agreed(group_, [&] {
    ranks = unpack_all(agreement, group_.size());
    decision.load.assign(static_cast<size_t>(decision.router->E), 0);
    for (const RouterStatistics& rank : ranks) {
      const std::vector<int64_t> load = rank.load();
      for (size_t e = 0; e < load.size(); ++e) decision.load[e] += load[e];
    }
  });
  decision.statistics = counts_in_other_group() ? sum_over_other_group(args, own)
                        : counts_each_rank()    ? own
                                                : sum(ranks);
  const std::vector<RouterStatistics> counted =
      counts_each_rank() ? ranks : std::vector<RouterStatistics>{decision.statistics};
  for (const RouterStatistics& statistics : counted) {
    decision.total_tokens += num_tokens(statistics);
    decision.total_sequences += num_sequences_with_tokens(statistics);
  }
  if (args.total_sequences > 0) decision.total_sequences = args.total_sequences;
  if (args.earlier != nullptr) decision.statistics.add(*args.earlier);
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
