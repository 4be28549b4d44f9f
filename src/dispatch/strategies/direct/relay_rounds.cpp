#include <algorithm>
#include <cstring>
#include <limits>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/wire.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock {
namespace {

constexpr int64_t kWidestValue = 8;  // bytes

// Rows that one rank sends or receives for a range.
struct Load {
  int64_t num_copies = 0;
  int64_t num_routes = 0;
};

Load most(const Load& a, const Load& b) {
  return {.num_copies = std::max(a.num_copies, b.num_copies),
          .num_routes = std::max(a.num_routes, b.num_routes)};
}

// Maximum number of rows of this size in flight.
int64_t max_rows_in_flight(const Exchange& exchange, int64_t row_bytes) {
  return std::max<int64_t>(
      1, exchange.group.options().staging_bytes / std::max<int64_t>(1, row_bytes));
}

// Maximum number of tokens in flight if each of their routes is a row.
int64_t max_tokens_in_flight(const Exchange& exchange, int64_t row_bytes) {
  return std::max<int64_t>(1, max_rows_in_flight(exchange, row_bytes) / exchange.plan.data().K);
}

// The range of a token; null if it is in a gap between ranges.
RelayRange* find_range(std::vector<RelayRange>& ranges, int64_t token) {
  const auto after =
      std::upper_bound(ranges.begin(), ranges.end(), token,
                       [](int64_t t, const RelayRange& range) { return t < range.first_token; });
  if (after == ranges.begin() || token >= std::prev(after)->last_token) return nullptr;
  return &*std::prev(after);
}

// Adds the rows of `tokens` to their ranges, with `route_offsets` [tokens + 1].
void add_rows(const std::vector<int64_t>& tokens, const std::vector<int64_t>& route_offsets,
              std::vector<RelayRange>& ranges) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    RelayRange* range = find_range(ranges, tokens[i]);
    if (range == nullptr) continue;
    ++range->num_copies;
    range->num_routes += route_offsets[i + 1] - route_offsets[i];
  }
}

// Rows that this rank sends or receives, whichever is more, per range.
std::vector<Load> own_loads(const Relay& relay, const std::vector<RelayRange>& ranges) {
  std::vector<RelayRange> sent = ranges;
  std::vector<RelayRange> received = ranges;
  add_rows(relay.copy_tokens, relay.slot_offsets, sent);
  add_rows(relay.arrival_tokens, relay.target_offsets, received);
  std::vector<Load> loads;
  for (size_t i = 0; i < ranges.size(); ++i) {
    loads.push_back(most({sent[i].num_copies, sent[i].num_routes},
                         {received[i].num_copies, received[i].num_routes}));
  }
  return loads;
}

// Sets every load to its maximum over the ranks; each rank computes a share. Collective.
void agree_on_most(const Exchange& exchange, std::vector<Load>& loads) {
  Group& group = exchange.group;
  const int64_t P = group.size();
  const int64_t n = std::ssize(loads);
  constexpr int64_t kBytes = sizeof(Load);
  std::vector<int64_t> share_offsets;  // [P + 1]
  for (int64_t r = 0; r <= P; ++r) share_offsets.push_back(n * r / P);
  const auto rank = static_cast<size_t>(group.rank());
  const int64_t own_size = share_offsets[rank + 1] - share_offsets[rank];
  std::vector<int64_t> own_offsets;  // [P + 1] this rank's share, received from every rank
  for (int64_t r = 0; r <= P; ++r) own_offsets.push_back(own_size * r);

  const Buffer all = group.pool().take_scratch(n * kBytes);
  std::memcpy(all.data(), loads.data(), static_cast<size_t>(n * kBytes));
  const Buffer arrived = exchange_rows(exchange, {.send = all,
                                                  .send_offsets = share_offsets,
                                                  .recv_offsets = own_offsets,
                                                  .row_bytes = kBytes});
  std::vector<Load> largest(static_cast<size_t>(own_size));
  for (int64_t i = 0; i < P * own_size; ++i) {
    Load one;
    std::memcpy(&one, arrived.data() + i * kBytes, sizeof one);
    Load& entry = largest[static_cast<size_t>(i % own_size)];
    entry = most(entry, one);
  }
  const Buffer own = group.pool().take_scratch(own_size * kBytes);
  if (own_size > 0) std::memcpy(own.data(), largest.data(), static_cast<size_t>(own_size * kBytes));
  group.all_gather_v(shared_bytes(own), shared_bytes(all), byte_offsets(share_offsets, kBytes),
                     group.wait_context(exchange.operation, exchange.sequence));
  std::memcpy(loads.data(), all.data(), static_cast<size_t>(n * kBytes));
}

// Index of the first token >= `token` in each block of `tokens`, ascending within a block.
std::vector<int64_t> find_token(const std::vector<int64_t>& tokens,
                                const std::vector<int64_t>& block_offsets, int64_t token) {
  std::vector<int64_t> places;
  for (size_t block = 0; block + 1 < block_offsets.size(); ++block) {
    const auto begin = tokens.begin() + block_offsets[block];
    const auto end = tokens.begin() + block_offsets[block + 1];
    places.push_back(std::lower_bound(begin, end, token) - tokens.begin());
  }
  return places;
}

RelayRound make_round(const Relay& relay, int64_t first_token, int64_t last_token) {
  return {.first_token = first_token,
          .last_token = last_token,
          .first_copy = find_token(relay.copy_tokens, relay.copy_offsets, first_token),
          .last_copy = find_token(relay.copy_tokens, relay.copy_offsets, last_token),
          .first_arrival = find_token(relay.arrival_tokens, relay.arrival_offsets, first_token),
          .last_arrival = find_token(relay.arrival_tokens, relay.arrival_offsets, last_token)};
}

}  // namespace

std::vector<RelayRange> divide_tokens(const Exchange& exchange, const Relay& relay) {
  const PlanData& plan = exchange.plan.data();
  const int64_t widest_row = plan.config->width * kWidestValue;
  const int64_t max_tokens =
      *std::max_element(plan.tokens_per_rank.begin(), plan.tokens_per_rank.end());
  const int64_t length = max_tokens_in_flight(exchange, widest_row);
  std::vector<RelayRange> open;
  for (int64_t token = 0; token < max_tokens; token += length) {
    open.push_back({.first_token = token, .last_token = token + length});
  }
  if (exchange.group.topology().num_nodes == 1) return open;

  // All ranks see the same loads, so they halve the same ranges.
  std::vector<RelayRange> ranges;
  while (!open.empty()) {
    std::vector<Load> loads = own_loads(relay, open);
    agree_on_most(exchange, loads);
    std::vector<RelayRange> halves;
    for (size_t i = 0; i < open.size(); ++i) {
      const auto [first, last, copies, routes] = open[i];
      if (loads[i].num_routes <= max_rows_in_flight(exchange, widest_row) || last - first == 1) {
        ranges.push_back({first, last, loads[i].num_copies, loads[i].num_routes});
      } else {
        const int64_t middle = first + (last - first) / 2;
        halves.push_back({.first_token = first, .last_token = middle});
        halves.push_back({.first_token = middle, .last_token = last});
      }
    }
    open = std::move(halves);
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const RelayRange& a, const RelayRange& b) { return a.first_token < b.first_token; });
  return ranges;
}

std::vector<RelayRound> relay_rounds(const Exchange& exchange, const Relay& relay,
                                     RelayedRows travelling, int64_t row_bytes) {
  const int64_t most_rows = max_rows_in_flight(exchange, row_bytes);
  const int64_t most_tokens = travelling == RelayedRows::kSums
                                  ? max_tokens_in_flight(exchange, row_bytes)
                                  : std::numeric_limits<int64_t>::max();
  std::vector<RelayRound> rounds;
  for (size_t i = 0; i < relay.ranges.size();) {
    const int64_t first_token = relay.ranges[i].first_token;
    int64_t last_token = first_token;
    int64_t num_rows = 0;
    for (; i < relay.ranges.size(); ++i) {
      const RelayRange& next = relay.ranges[i];
      num_rows += travelling == RelayedRows::kRoutes ? next.num_routes : next.num_copies;
      const bool fits = num_rows <= most_rows && next.last_token - first_token <= most_tokens;
      if (!fits && last_token > first_token) break;
      last_token = next.last_token;
    }
    rounds.push_back(make_round(relay, first_token, last_token));
  }
  return rounds;
}

}  // namespace crossdock
