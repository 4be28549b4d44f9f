#include <algorithm>

#include "core/sizes.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock {
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

}  // namespace crossdock
