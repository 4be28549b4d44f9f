// Random worlds: whatever the shapes, the routing and the options, all strategies give the results
// of the reference.

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <mutex>

#include "testing/conformance/expect_conformance.hpp"
#include "testing/conformance/values.hpp"

namespace crossdock::conformance {
namespace {

template <typename T>
T one_of(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}

// The slots of a token: different experts and -1, in any order.
std::vector<int64_t> random_slots(int64_t num_experts, int64_t num_slots, uint64_t seed,
                                  bool dense) {
  std::vector<int64_t> experts;
  for (int64_t e = 0; e < num_experts; ++e) experts.push_back(e);
  std::vector<int64_t> slots;
  for (int64_t k = 0; k < num_slots; ++k) {
    const uint64_t hash = hash_of(seed, static_cast<uint64_t>(k));
    const auto index = static_cast<int64_t>(hash % experts.size());
    slots.push_back(hash >> 61 == 0 ? -1 : experts[static_cast<size_t>(index)]);
    experts.erase(experts.begin() + index);
  }
  if (dense) {
    std::sort(slots.begin(), slots.end(), [](int64_t a, int64_t b) {
      return static_cast<uint64_t>(a) < static_cast<uint64_t>(b);
    });
  }
  return slots;
}

DispatchConfig random_config(int num_ranks, int64_t most_tokens) {
  DispatchConfig config;
  config.num_experts = *rc::gen::inRange<int64_t>(1, 12);
  config.top_k = *rc::gen::inRange<int64_t>(1, std::min<int64_t>(config.num_experts, 5) + 1);
  config.width = *rc::gen::inRange<int64_t>(1, 70);
  config.alignment = one_of<int64_t>({1, 1, 8, 32});
  if (*rc::gen::inRange(0, 3) == 0) {
    Capacity capacity;
    capacity.factor = one_of({0.1, 0.5, 1.0, 1.7});
    capacity.policy = one_of({DropPolicy::kPosition, DropPolicy::kWeight});
    capacity.pad_to_capacity = *rc::gen::arbitrary<bool>();
    capacity.max_tokens = most_tokens;
    config.capacity = capacity;
  }
  if (*rc::gen::inRange(0, 3) == 0) {
    for (int64_t e = 0; e < config.num_experts; ++e) {
      config.placement.push_back(*rc::gen::inRange(0, num_ranks));
    }
  }
  config.partial_sums = one_of({PartialSums::kNone, PartialSums::kNone, PartialSums::kNone,
                                PartialSums::kF32, PartialSums::kRowType});
  return config;
}

World random_world() {
  const int num_ranks = *rc::gen::inRange(1, 6);
  const auto tokens = *rc::gen::container<std::vector<int64_t>>(static_cast<size_t>(num_ranks),
                                                                rc::gen::inRange<int64_t>(0, 16));
  const auto seed = *rc::gen::arbitrary<uint64_t>();
  World world;
  world.name = "random";
  world.config = random_config(num_ranks, *std::max_element(tokens.begin(), tokens.end()) + 1);
  world.dtype = one_of({DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kF8E4M3});
  world.wide_ids = *rc::gen::arbitrary<bool>();
  world.dense = *rc::gen::inRange(0, 3) == 0;
  if (world.dense && *rc::gen::arbitrary<bool>()) {
    world.slots = *rc::gen::inRange(world.config.top_k, world.config.num_experts + 1);
    world.config.max_routes_per_token = world.slots;
  }
  world.exact_sums = world.config.partial_sums != PartialSums::kNone;
  const bool masked = *rc::gen::inRange(0, 3) == 0;
  for (size_t r = 0; r < tokens.size(); ++r) {
    reference::RankInput rank;
    rank.T = tokens[r];
    for (int64_t t = 0; t < rank.T; ++t) {
      const uint64_t token_seed = hash_of(seed, r, static_cast<uint64_t>(t));
      const auto slots =
          random_slots(world.config.num_experts, world.num_slots(), token_seed, world.dense);
      rank.expert_ids.insert(rank.expert_ids.end(), slots.begin(), slots.end());
      if (masked) rank.mask.push_back(token_seed % 4 == 0);
    }
    world.ranks.push_back(std::move(rank));
  }
  make_weights(world);
  return world;
}

RC_GTEST_PROP(RandomWorlds, GiveTheReferencesResults, ()) {
  const World world = random_world();
  const auto name = *rc::gen::elementOf(strategy_names());
  const int num_ranks = static_cast<int>(world.ranks.size());
  const int per_node = *rc::gen::inRange(0, num_ranks + 1);
  std::mutex mutex;
  Findings all;
  run_ranks(num_ranks,
            [&](Group& group) {
              const Findings findings = judge(
                  group, [&] { return make_strategy(name); }, world);
              const std::lock_guard lock(mutex);
              all.insert(all.end(), findings.begin(), findings.end());
            },
            {.ranks_per_node = per_node, .group = test_deadlines()});
  for (const std::string& finding : all) RC_LOG() << name << ": " << finding << "\n";
  RC_ASSERT(all.empty());
}

}  // namespace
}  // namespace crossdock::conformance
