#include <utility>

#include "dispatch/relay.hpp"

namespace crossdock {
namespace {

// Copies of tokens in blocks by peer, each with the things it serves: slots, or targets.
template <typename Thing>
struct CopiesView {
  std::span<const int64_t> block_offsets;  // [P + 1] into tokens
  std::span<const int64_t> tokens;         // [copies]
  std::span<const int64_t> thing_offsets;  // [copies + 1] into things
  std::span<const Thing> things;
};

template <typename Thing>
struct Copies {
  std::vector<int64_t> block_offsets{0};
  std::vector<int64_t> tokens;
  std::vector<int64_t> thing_offsets{0};
  std::vector<Thing> things;
};

// The copies with a thing that is kept, with these things.
template <typename Thing, typename Keep>
Copies<Thing> filter(const CopiesView<Thing>& all, const Keep& keep) {
  Copies<Thing> kept;
  for (size_t block = 0; block + 1 < all.block_offsets.size(); ++block) {
    for (int64_t copy = all.block_offsets[block]; copy < all.block_offsets[block + 1]; ++copy) {
      const auto c = static_cast<size_t>(copy);
      for (int64_t i = all.thing_offsets[c]; i < all.thing_offsets[c + 1]; ++i) {
        const Thing& thing = all.things[static_cast<size_t>(i)];
        if (keep(thing)) kept.things.push_back(thing);
      }
      if (std::ssize(kept.things) == kept.thing_offsets.back()) continue;
      kept.tokens.push_back(all.tokens[c]);
      kept.thing_offsets.push_back(std::ssize(kept.things));
    }
    kept.block_offsets.push_back(std::ssize(kept.tokens));
  }
  return kept;
}

}  // namespace

Relay part_of_relay(const Relay& relay, const PlanData& part, const ExpertChunk& chunk) {
  Copies<int64_t> leaving = filter(
      CopiesView<int64_t>{relay.copy_offsets, relay.copy_tokens, relay.slot_offsets, relay.slots},
      [&](int64_t slot) { return part.expert_ids[static_cast<size_t>(slot)] >= 0; });
  Copies<RelayTarget> coming =
      filter(CopiesView<RelayTarget>{relay.arrival_offsets, relay.arrival_tokens,
                                     relay.target_offsets, relay.targets},
             [&](const RelayTarget& target) {
               return chunk.holds(static_cast<int>(target.rank), target.row);
             });
  return {.copy_offsets = std::move(leaving.block_offsets),
          .copy_tokens = std::move(leaving.tokens),
          .slot_offsets = std::move(leaving.thing_offsets),
          .slots = std::move(leaving.things),
          .arrival_offsets = std::move(coming.block_offsets),
          .arrival_tokens = std::move(coming.tokens),
          .target_offsets = std::move(coming.thing_offsets),
          .targets = std::move(coming.things),
          .stretches = relay.stretches};  // with as many rows or fewer
}

}  // namespace crossdock
