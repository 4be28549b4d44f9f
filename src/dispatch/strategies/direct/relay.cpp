#include "dispatch/strategies/direct/relay.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>

#include "core/stream_copy.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/wire.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

// Offsets of the parts [first[r], last[r]) when they are concatenated, with the size of part r
// given by `size`.
template <typename Size>
std::vector<int64_t> offsets_of(const std::vector<int64_t>& first, const std::vector<int64_t>& last,
                                const Size& size) {
  std::vector<int64_t> offsets{0};
  for (size_t r = 0; r < first.size(); ++r) {
    offsets.push_back(offsets.back() + size(first[r], last[r]));
  }
  return offsets;
}

int64_t count(int64_t first, int64_t last) {
  return last - first;
}

// Calls visit(i) for every i of all parts, in order.
template <typename Visit>
void for_each(const std::vector<int64_t>& first, const std::vector<int64_t>& last,
              const Visit& visit) {
  for (size_t r = 0; r < first.size(); ++r) {
    for (int64_t i = first[r]; i < last[r]; ++i) visit(static_cast<size_t>(i));
  }
}

std::vector<const std::byte*> target_rows(const Relay& relay, const RelayRound& round,
                                          const PeerRows& peers, int64_t row_bytes) {
  std::vector<const std::byte*> rows;
  for_each(round.first_arrival, round.last_arrival, [&](size_t arrival) {
    for (int64_t i = relay.target_offsets[arrival]; i < relay.target_offsets[arrival + 1]; ++i) {
      const RelayTarget& target = relay.targets[static_cast<size_t>(i)];
      rows.push_back(peers.at(static_cast<int>(target.rank)) + target.row * row_bytes);
    }
  });
  return rows;
}

}  // namespace

void relay_round_out(const StrategyCall& call, const Relay& relay, const RelayRound& round,
                     const RowPart& part, const PeerRows& peers, size_t entry) {
  std::vector<int64_t> tokens;
  for_each(round.first_copy, round.last_copy,
           [&](size_t copy) { tokens.push_back(relay.copy_tokens[copy]); });
  const Buffer packed = call.group.pool().take_scratch(std::ssize(tokens) * part.row_bytes);
  ops::gather_rows({.x = part.tokens,
                    .index = tokens.data(),
                    .rows = packed.data(),
                    .num_rows = std::ssize(tokens),
                    .row_bytes = part.row_bytes});
  const Buffer arrived = exchange_rows(
      call, {.send = packed,
             .send_offsets = offsets_of(round.first_copy, round.last_copy, count),
             .recv_offsets = offsets_of(round.first_arrival, round.last_arrival, count),
             .row_bytes = part.row_bytes});
  const Stores stores = stores_for(arrived.num_bytes());
  const std::byte* row = arrived.data();
  for_each(round.first_arrival, round.last_arrival, [&](size_t arrival) {
    for (int64_t i = relay.target_offsets[arrival]; i < relay.target_offsets[arrival + 1]; ++i) {
      const RelayTarget& target = relay.targets[static_cast<size_t>(i)];
      std::byte* rows = peers.at(static_cast<int>(target.rank), entry);
      copy_bytes(rows + target.row * part.row_bytes, row, part.row_bytes, stores);
    }
    row += part.row_bytes;
  });
  finish_stores();
}

ReturnedRows return_round(const StrategyCall& call, const Relay& relay, const RelayRound& round,
                          const GatherSumArgs& args, const PeerRows& peers) {
  const int64_t row_bytes = args.rows.row_bytes();
  const auto rows = target_rows(relay, round, peers, row_bytes);
  const Buffer packed = call.group.pool().take_scratch(std::ssize(rows) * row_bytes);
  std::byte* to = packed.data();
  for (const std::byte* row : rows) {
    copy_bytes(to, row, row_bytes, Stores::kCached);
    to += row_bytes;
  }
  ReturnedRows returned;
  for_each(round.first_copy, round.last_copy, [&](size_t copy) {
    for (int64_t i = relay.slot_offsets[copy]; i < relay.slot_offsets[copy + 1]; ++i) {
      returned.numbers.push_back(relay.slots[static_cast<size_t>(i)]);
    }
  });
  const auto targets = [&](int64_t first, int64_t last) {
    return relay.target_offsets[static_cast<size_t>(last)] -
           relay.target_offsets[static_cast<size_t>(first)];
  };
  const auto slots = [&](int64_t first, int64_t last) {
    return relay.slot_offsets[static_cast<size_t>(last)] -
           relay.slot_offsets[static_cast<size_t>(first)];
  };
  returned.rows = exchange_rows(
      call, {.send = packed,
             .send_offsets = offsets_of(round.first_arrival, round.last_arrival, targets),
             .recv_offsets = offsets_of(round.first_copy, round.last_copy, slots),
             .row_bytes = row_bytes});
  return returned;
}

ReturnedRows return_round_sums(const StrategyCall& call, const Relay& relay,
                               const RelayRound& round, const GatherSumArgs& args,
                               const PeerRows& peers) {
  const auto rows = target_rows(relay, round, peers, args.rows.row_bytes());
  std::vector<int64_t> offsets{0};
  std::vector<double> weights;
  for_each(round.first_arrival, round.last_arrival, [&](size_t arrival) {
    for (int64_t i = relay.target_offsets[arrival]; i < relay.target_offsets[arrival + 1]; ++i) {
      weights.push_back(relay.targets[static_cast<size_t>(i)].weight);
    }
    offsets.push_back(std::ssize(weights));
  });
  const std::vector<float> float_weights(weights.begin(), weights.end());
  const void* typed_weights = args.rows.dtype == DType::kF64
                                  ? static_cast<const void*>(weights.data())
                                  : static_cast<const void*>(float_weights.data());
  const Buffer sums =
      call.group.pool().take_scratch((std::ssize(offsets) - 1) * partial_row_bytes(call, args));
  ops::sum_rows({.rows = rows.data(),
                 .offsets = offsets.data(),
                 .weights = args.weights.given() ? typed_weights : nullptr,
                 .out = sums.data(),
                 .N = std::ssize(offsets) - 1,
                 .D = args.rows.shape[1],
                 .row_dtype = args.rows.dtype,
                 .out_dtype = partial_dtype(call, args)},
                *call.group.threads());
  ReturnedRows returned;
  for_each(round.first_copy, round.last_copy,
           [&](size_t copy) { returned.numbers.push_back(static_cast<int64_t>(copy)); });
  returned.rows = exchange_rows(
      call, {.send = sums,
             .send_offsets = offsets_of(round.first_arrival, round.last_arrival, count),
             .recv_offsets = offsets_of(round.first_copy, round.last_copy, count),
             .row_bytes = partial_row_bytes(call, args)});
  return returned;
}

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
int64_t max_rows_in_flight(const StrategyCall& call, int64_t row_bytes) {
  return std::max<int64_t>(1, call.group.options().staging_bytes / std::max<int64_t>(1, row_bytes));
}

// Maximum number of tokens in flight if each of their routes is a row.
int64_t max_tokens_in_flight(const StrategyCall& call, int64_t row_bytes) {
  return std::max<int64_t>(1, max_rows_in_flight(call, row_bytes) / call.plan.data().K);
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
void agree_on_most(const StrategyCall& call, std::vector<Load>& loads) {
  Group& group = call.group;
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
  const Buffer arrived = exchange_rows(call, {.send = all,
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
                     group.wait_context(call.operation, call.sequence));
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

std::vector<RelayRange> divide_tokens(const StrategyCall& call, const Relay& relay) {
  const PlanData& plan = call.plan.data();
  const int64_t widest_row = plan.config->width * kWidestValue;
  const int64_t max_tokens =
      *std::max_element(plan.tokens_per_rank.begin(), plan.tokens_per_rank.end());
  const int64_t length = max_tokens_in_flight(call, widest_row);
  std::vector<RelayRange> open;
  for (int64_t token = 0; token < max_tokens; token += length) {
    open.push_back({.first_token = token, .last_token = token + length});
  }
  if (call.group.topology().num_nodes == 1) return open;

  // All ranks see the same loads, so they halve the same ranges.
  std::vector<RelayRange> ranges;
  while (!open.empty()) {
    std::vector<Load> loads = own_loads(relay, open);
    agree_on_most(call, loads);
    std::vector<RelayRange> halves;
    for (size_t i = 0; i < open.size(); ++i) {
      const auto [first, last, copies, routes] = open[i];
      if (loads[i].num_routes <= max_rows_in_flight(call, widest_row) || last - first == 1) {
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

std::vector<RelayRound> relay_rounds(const StrategyCall& call, const Relay& relay,
                                     RelayedRows travelling, int64_t row_bytes) {
  const int64_t most_rows = max_rows_in_flight(call, row_bytes);
  const int64_t most_tokens = travelling == RelayedRows::kSums
                                  ? max_tokens_in_flight(call, row_bytes)
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

namespace {

// The chunk that contains a row of a rank.
size_t chunk_of(std::span<const ExpertChunk> chunks, int rank, int64_t row) {
  const auto is_before = [&](const ExpertChunk& chunk) {
    return row >= chunk.last_row[index(rank)];
  };
  return index(std::partition_point(chunks.begin(), chunks.end(), is_before) - chunks.begin());
}

// Calls visit(part, copy) for every copy, block by block, and end_block() after each block. `part`
// is the first of the chunks of the copy's elements i in [element_offsets[copy],
// element_offsets[copy + 1]).
template <typename ChunkOf, typename Visit, typename EndBlock>
void for_each_copy(const std::vector<int64_t>& block_offsets,
                   const std::vector<int64_t>& element_offsets, const ChunkOf& chunk_of_element,
                   const Visit& visit, const EndBlock& end_block) {
  for (size_t block = 0; block + 1 < block_offsets.size(); ++block) {
    for (int64_t copy = block_offsets[block]; copy < block_offsets[block + 1]; ++copy) {
      const int64_t first = element_offsets[index(copy)];
      size_t part = chunk_of_element(first);  // a copy has at least one
      for (int64_t i = first + 1; i < element_offsets[index(copy) + 1]; ++i) {
        part = std::min(part, chunk_of_element(i));
      }
      visit(part, index(copy));
    }
    end_block();
  }
}

}  // namespace

std::vector<Relay> split_relay(const Relay& relay, const PlanData& plan,
                               std::span<const ExpertChunk> chunks) {
  std::vector<Relay> parts(chunks.size());
  for (Relay& part : parts) {
    part.copy_offsets = part.arrival_offsets = part.target_offsets = {0};
    part.ranges = relay.ranges;  // upper bounds: a part has at most as many rows
  }
  for_each_copy(
      relay.copy_offsets, relay.slot_offsets,
      [&](int64_t i) {
        const size_t slot = index(relay.slots[index(i)]);
        return chunk_of(chunks, plan.owner[index(plan.expert_ids[slot])], plan.final_rows[slot]);
      },
      [&](size_t part, size_t copy) { parts[part].copy_tokens.push_back(relay.copy_tokens[copy]); },
      [&] {
        for (Relay& part : parts) part.copy_offsets.push_back(std::ssize(part.copy_tokens));
      });
  for_each_copy(
      relay.arrival_offsets, relay.target_offsets,
      [&](int64_t i) {
        const RelayTarget& target = relay.targets[index(i)];
        return chunk_of(chunks, static_cast<int>(target.rank), target.row);
      },
      [&](size_t number, size_t arrival) {
        Relay& part = parts[number];
        part.arrival_tokens.push_back(relay.arrival_tokens[arrival]);
        part.targets.insert(part.targets.end(),
                            relay.targets.begin() + relay.target_offsets[arrival],
                            relay.targets.begin() + relay.target_offsets[arrival + 1]);
        part.target_offsets.push_back(std::ssize(part.targets));
      },
      [&] {
        for (Relay& part : parts) part.arrival_offsets.push_back(std::ssize(part.arrival_tokens));
      });
  return parts;
}

namespace {

// A partial of a token, for sorting.
struct Partial {
  int group = 0;
  int64_t number = 0;
};

// A relayed copy of a token and its sum group.
struct TokenCopy {
  int64_t token = 0;
  int group = 0;
  int64_t copy = 0;
};

std::vector<TokenCopy> copies_by_token(const Relay& relay, const SumGroup& group_of) {
  std::vector<TokenCopy> copies;
  for (size_t gateway = 0; gateway + 1 < relay.copy_offsets.size(); ++gateway) {
    for (int64_t i = relay.copy_offsets[gateway]; i < relay.copy_offsets[gateway + 1]; ++i) {
      copies.push_back(
          {relay.copy_tokens[static_cast<size_t>(i)], group_of(static_cast<int>(gateway)), i});
    }
  }
  std::stable_sort(copies.begin(), copies.end(),
                   [](const TokenCopy& a, const TokenCopy& b) { return a.token < b.token; });
  return copies;
}

// Adds the near sums of token t to `partials`, and lists their slots in `sums`.
void add_near(const StrategyCall& call, int64_t t, const SumGroup& group_of, SourcePartials& sums,
              std::vector<Partial>& partials) {
  const PlanData& plan = call.plan.data();
  std::vector<std::pair<int, int64_t>> slots;  // (group, slot)
  for (int64_t slot = t * plan.K; slot < (t + 1) * plan.K; ++slot) {
    const int32_t expert = plan.expert_ids[static_cast<size_t>(slot)];
    if (expert < 0) continue;
    const int owner = plan.owner[static_cast<size_t>(expert)];
    if (is_reachable(call, owner)) slots.emplace_back(group_of(owner), slot);
  }
  std::sort(slots.begin(), slots.end());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i == 0 || slots[i].first != slots[i - 1].first) {
      partials.push_back({slots[i].first, sums.num_near()});
      sums.near_offsets.push_back(sums.near_offsets.back());
    }
    sums.near_slots.push_back(slots[i].second);
    ++sums.near_offsets.back();
  }
}

}  // namespace

SourcePartials make_source_partials(const StrategyCall& call, const Relay& relay,
                                    const SumGroup& group_of) {
  const PlanData& plan = call.plan.data();
  const std::vector<TokenCopy> copies = copies_by_token(relay, group_of);
  SourcePartials sums;
  sums.near_offsets = sums.near_token_offsets = sums.partial_token_offsets = {0};
  std::vector<Partial> partials;
  size_t next_copy = 0;
  for (int64_t t = 0; t < plan.T; ++t) {
    partials.clear();
    add_near(call, t, group_of, sums, partials);
    for (; next_copy < copies.size() && copies[next_copy].token == t; ++next_copy) {
      partials.push_back({copies[next_copy].group, ~copies[next_copy].copy});
    }
    std::stable_sort(partials.begin(), partials.end(),
                     [](const Partial& a, const Partial& b) { return a.group < b.group; });
    for (const Partial& partial : partials) sums.partials.push_back(partial.number);
    sums.near_token_offsets.push_back(sums.num_near());
    sums.partial_token_offsets.push_back(std::ssize(sums.partials));
  }
  return sums;
}

void sum_grouped(const StrategyCall& call, const PeerRows& peers, const GroupedSumArgs& args) {
  const PlanData& plan = call.plan.data();
  const SourcePartials& partials = args.partials;
  const GatherSumArgs& sum = args.sum;
  const DType dtype = partial_dtype(call, sum);
  const int64_t row_bytes = partial_row_bytes(call, sum);
  const auto first = static_cast<size_t>(args.first_token);
  const auto last = static_cast<size_t>(args.last_token);

  // The near sums of these tokens.
  const auto first_near = static_cast<size_t>(partials.near_token_offsets[first]);
  const auto last_near = static_cast<size_t>(partials.near_token_offsets[last]);
  const int64_t first_slot = partials.near_offsets[first_near];
  std::vector<int64_t> offsets;
  for (size_t i = first_near; i <= last_near; ++i) {
    offsets.push_back(partials.near_offsets[i] - first_slot);
  }
  const int64_t weight_bytes = size_of(plan.weight_dtype);
  std::vector<const std::byte*> rows;
  const Buffer weights = call.group.pool().take_scratch(offsets.back() * weight_bytes);
  for (int64_t i = 0; i < offsets.back(); ++i) {
    const int64_t slot = partials.near_slots[static_cast<size_t>(first_slot + i)];
    const auto s = static_cast<size_t>(slot);
    const int owner = plan.owner[static_cast<size_t>(plan.expert_ids[s])];
    rows.push_back(peers.at(owner) + plan.final_rows[s] * sum.rows.row_bytes());
    std::copy_n(plan.weights.data() + slot * weight_bytes, weight_bytes,
                weights.data() + i * weight_bytes);
  }
  const Buffer near = call.group.pool().take_scratch((std::ssize(offsets) - 1) * row_bytes);
  ops::sum_rows({.rows = rows.data(),
                 .offsets = offsets.data(),
                 .weights = sum.weights.given() ? weights.data() : nullptr,
                 .out = near.data(),
                 .N = std::ssize(offsets) - 1,
                 .D = sum.out.shape[1],
                 .row_dtype = sum.rows.dtype,
                 .out_dtype = dtype},
                *call.group.threads());

  // All partials of these tokens.
  std::unordered_map<int64_t, int64_t> place_of_copy;
  for (const int64_t copy : args.returned.numbers) {
    place_of_copy.emplace(copy, std::ssize(place_of_copy));
  }
  rows.clear();
  offsets = {0};
  for (size_t t = first; t < last; ++t) {
    for (int64_t i = partials.partial_token_offsets[t]; i < partials.partial_token_offsets[t + 1];
         ++i) {
      const int64_t number = partials.partials[static_cast<size_t>(i)];
      rows.push_back(number >= 0
                         ? near.data() + (number - static_cast<int64_t>(first_near)) * row_bytes
                         : args.returned.rows.data() + place_of_copy.at(~number) * row_bytes);
    }
    offsets.push_back(std::ssize(rows));
  }
  ops::sum_rows(
      {.rows = rows.data(),
       .offsets = offsets.data(),
       .out = static_cast<std::byte*>(sum.out.data) + args.first_token * sum.out.row_bytes(),
       .N = args.last_token - args.first_token,
       .D = sum.out.shape[1],
       .row_dtype = dtype,
       .out_dtype = sum.out.dtype},
      *call.group.threads());
}

}  // namespace crossdock
