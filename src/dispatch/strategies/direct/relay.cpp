#include "dispatch/strategies/direct/relay.hpp"

#include "core/stream_copy.hpp"
#include "dispatch/host/partial_sums.hpp"
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

void relay_round_out(const Exchange& exchange, const Relay& relay, const RelayRound& round,
                     const RowPart& part, const PeerRows& peers, size_t entry) {
  std::vector<int64_t> tokens;
  for_each(round.first_copy, round.last_copy,
           [&](size_t copy) { tokens.push_back(relay.copy_tokens[copy]); });
  const Buffer packed = exchange.group.pool().take_scratch(std::ssize(tokens) * part.row_bytes);
  ops::gather_rows({.x = part.tokens,
                    .index = tokens.data(),
                    .rows = packed.data(),
                    .num_rows = std::ssize(tokens),
                    .row_bytes = part.row_bytes});
  const Buffer arrived = exchange_rows(
      exchange, {.send = packed,
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

ReturnedRows return_round(const Exchange& exchange, const Relay& relay, const RelayRound& round,
                          const GatherSumArgs& args, const PeerRows& peers) {
  const int64_t row_bytes = args.rows.row_bytes();
  const auto rows = target_rows(relay, round, peers, row_bytes);
  const Buffer packed = exchange.group.pool().take_scratch(std::ssize(rows) * row_bytes);
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
      exchange, {.send = packed,
                 .send_offsets = offsets_of(round.first_arrival, round.last_arrival, targets),
                 .recv_offsets = offsets_of(round.first_copy, round.last_copy, slots),
                 .row_bytes = row_bytes});
  return returned;
}

ReturnedRows return_round_sums(const Exchange& exchange, const Relay& relay,
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
  const Buffer sums = exchange.group.pool().take_scratch((std::ssize(offsets) - 1) *
                                                         partial_row_bytes(exchange, args));
  ops::sum_rows({.rows = rows.data(),
                 .offsets = offsets.data(),
                 .weights = args.weights.given() ? typed_weights : nullptr,
                 .out = sums.data(),
                 .N = std::ssize(offsets) - 1,
                 .D = args.rows.shape[1],
                 .row_dtype = args.rows.dtype,
                 .out_dtype = partial_dtype(exchange, args)},
                *exchange.group.threads());
  ReturnedRows returned;
  for_each(round.first_copy, round.last_copy,
           [&](size_t copy) { returned.numbers.push_back(static_cast<int64_t>(copy)); });
  returned.rows = exchange_rows(
      exchange, {.send = sums,
                 .send_offsets = offsets_of(round.first_arrival, round.last_arrival, count),
                 .recv_offsets = offsets_of(round.first_copy, round.last_copy, count),
                 .row_bytes = partial_row_bytes(exchange, args)});
  return returned;
}

}  // namespace crossdock
