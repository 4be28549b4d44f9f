#include "testing/conformance/worlds.hpp"

#include <algorithm>
#include <numeric>

#include "testing/conformance/values.hpp"

namespace crossdock::conformance {
namespace {

constexpr std::array<int64_t, 5> kWidths = {5, 64, 1, 130, 33};

// K different experts from `allowed`, not in ascending order; a larger `skew` favours the first
// ones of `allowed`. If there are fewer than K, the remaining slots are -1.
std::vector<int64_t> draw_experts(const std::vector<int64_t>& allowed, int64_t top_k, int skew,
                                  uint64_t seed) {
  std::vector<int64_t> left = allowed;
  std::vector<int64_t> drawn;
  for (int64_t k = 0; k < top_k; ++k) {
    if (left.empty()) {
      drawn.push_back(-1);
      continue;
    }
    size_t index = hash_of(seed, static_cast<uint64_t>(k)) % left.size();
    for (int i = 0; i < skew; ++i) {
      index = std::min<size_t>(
          index,
          hash_of(seed, static_cast<uint64_t>(k), static_cast<uint64_t>(i) + 1) % left.size());
    }
    drawn.push_back(left[index]);
    left.erase(left.begin() + static_cast<int64_t>(index));
  }
  return drawn;
}

int64_t tokens_of(RoutingKind routing, int rank, int num_ranks) {
  switch (routing) {
    case RoutingKind::kNoTokens:
      return 0;
    case RoutingKind::kRankHasNoTokens:
      return rank == num_ranks / 2 ? 0 : 7;
    case RoutingKind::kUnequalCounts:
      return (rank * 7 + 3) % 17;
    default:
      return 9;
  }
}

int64_t experts_of(RoutingKind routing, int num_ranks) {
  if (routing == RoutingKind::kRankWithoutExperts) return std::max(1, num_ranks - 1);
  return 2 * num_ranks + 3;  // not divisible by most P
}

std::vector<int64_t> all_experts(int64_t num_experts) {
  std::vector<int64_t> experts(static_cast<size_t>(num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  return experts;
}

std::vector<int64_t> route_token(RoutingKind routing, const World& world, uint64_t token) {
  const DispatchConfig& config = world.config;
  const int64_t K = config.top_k;
  std::vector<int64_t> experts = all_experts(config.num_experts);
  switch (routing) {
    case RoutingKind::kBalanced: {
      std::vector<int64_t> ids;
      for (int64_t k = 0; k < K; ++k) {
        ids.push_back((static_cast<int64_t>(token) * K + k) % config.num_experts);
      }
      return ids;
    }
    case RoutingKind::kSkewed:
      return draw_experts(experts, K, 3, token);
    case RoutingKind::kOneExpertTakesAll:
      return {config.num_experts / 2};
    case RoutingKind::kRankReceivesNothing: {
      const auto num_ranks = static_cast<int>(world.ranks.size());
      const std::vector<int32_t> owners = reference::owners_of(config, num_ranks);
      std::erase_if(experts,
                    [&](int64_t e) { return owners[static_cast<size_t>(e)] == num_ranks / 2; });
      return draw_experts(experts, K, 0, token);
    }
    case RoutingKind::kAbsentRoutes: {
      std::vector<int64_t> ids = draw_experts(experts, K, 0, token);
      for (int64_t k = 0; k < K; ++k) {
        if (token % 4 == 1 || hash_of(token, 77, static_cast<uint64_t>(k)) % 3 == 0) {
          ids[static_cast<size_t>(k)] = -1;
        }
      }
      return ids;
    }
    default:
      return draw_experts(experts, K, 0, token);
  }
}

// Slots in ascending order of experts, those without a route last, as in a dense map.
void sort_slots(World& world) {
  const int64_t K = world.num_slots();
  for (reference::RankInput& rank : world.ranks) {
    for (int64_t t = 0; t < rank.T; ++t) {
      const auto first = rank.expert_ids.begin() + t * K;
      std::sort(first, first + K, [](int64_t a, int64_t b) {
        return static_cast<uint64_t>(a) < static_cast<uint64_t>(b);  // -1 is the largest
      });
    }
  }
}

// Any number of the world's experts for every token, so the map may have more bits than top_k.
void draw_bits(World& world) {
  std::vector<int64_t> used;
  uint64_t num_tokens = 0;
  for (const reference::RankInput& rank : world.ranks) {
    used.insert(used.end(), rank.expert_ids.begin(), rank.expert_ids.end());
    num_tokens += static_cast<uint64_t>(rank.T);
  }
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  std::erase(used, -1);
  const auto num_bits = [&](uint64_t token) {
    if (token % 7 == 3) return std::ssize(used);
    return static_cast<int64_t>(hash_of(token, 23) % (used.size() + 1));
  };
  world.slots = std::max(world.config.top_k, world.config.max_routes_per_token);
  for (uint64_t t = 0; t < num_tokens; ++t) world.slots = std::max(world.slots, num_bits(t));
  uint64_t token = 0;
  for (reference::RankInput& rank : world.ranks) {
    rank.expert_ids.clear();
    for (int64_t t = 0; t < rank.T; ++t, ++token) {
      std::vector<int64_t> ids = draw_experts(used, num_bits(token), 0, token);
      ids.resize(static_cast<size_t>(world.slots), -1);
      rank.expert_ids.insert(rank.expert_ids.end(), ids.begin(), ids.end());
    }
  }
}

void add_mask(World& world) {
  for (size_t r = 0; r < world.ranks.size(); ++r) {
    reference::RankInput& rank = world.ranks[r];
    for (int64_t t = 0; t < rank.T; ++t) {
      rank.mask.push_back(hash_of(r, static_cast<uint64_t>(t), 5) % 3 == 0);
    }
  }
}

int64_t most_tokens(const World& world) {
  int64_t most = 1;
  for (const reference::RankInput& rank : world.ranks) most = std::max(most, rank.T);
  return most;
}

void set_variant(Variant variant, World& world) {
  DispatchConfig& config = world.config;
  switch (variant) {
    case Variant::kPlain:
      break;
    case Variant::kAlignment:
      config.alignment = 16;
      break;
    case Variant::kCapacityPosition:
      config.capacity = Capacity{.factor = 0.6, .policy = DropPolicy::kPosition};
      break;
    case Variant::kCapacityWeight:
      config.capacity = Capacity{.factor = 0.6, .policy = DropPolicy::kWeight};
      break;
    case Variant::kPadToCapacity:
      config.capacity = Capacity{.factor = 1.4,
                                 .policy = DropPolicy::kPosition,
                                 .pad_to_capacity = true,
                                 .max_tokens = most_tokens(world) + 1};
      config.alignment = 8;
      break;
    case Variant::kPlacement:
      for (int64_t e = 0; e < config.num_experts; ++e) {
        config.placement.push_back(
            static_cast<int32_t>((e * 5 + 1) % static_cast<int64_t>(world.ranks.size())));
      }
      break;
    case Variant::kPartialSums:
      config.partial_sums = PartialSums::kF32;
      world.exact_sums = true;
      break;
    case Variant::kPartialSumsInRowType:
      config.partial_sums = PartialSums::kRowType;
      world.exact_sums = true;
      break;
    case Variant::kDenseMap:
      world.dense = true;
      sort_slots(world);
      break;
    case Variant::kMask:
      add_mask(world);
      break;
    case Variant::kWideIds:
      world.wide_ids = true;
      break;
    case Variant::kBoundedBits:
      config.max_routes_per_token = config.num_experts;
      [[fallthrough]];
    case Variant::kAnyBits:
      world.dense = true;
      draw_bits(world);
      sort_slots(world);
      break;
  }
}

}  // namespace

World make_world(RoutingKind routing, Variant variant, DType dtype, int num_ranks) {
  const auto kind = static_cast<size_t>(routing);
  World world;
  world.name = std::string(kRoutingNames[kind]) + "/" + std::string(name_of(dtype)) + "/" +
               std::string(kVariantNames[static_cast<size_t>(variant)]);
  world.dtype = dtype;
  world.config.num_experts = experts_of(routing, num_ranks);
  world.config.top_k = routing == RoutingKind::kOneExpertTakesAll
                           ? 1
                           : std::min<int64_t>(4, world.config.num_experts);
  world.config.width =
      kWidths[(kind + static_cast<size_t>(variant) + static_cast<size_t>(dtype)) % kWidths.size()];
  world.ranks.resize(static_cast<size_t>(num_ranks));
  uint64_t token = 0;
  for (int r = 0; r < num_ranks; ++r) {
    reference::RankInput& rank = world.ranks[static_cast<size_t>(r)];
    rank.T = tokens_of(routing, r, num_ranks);
    for (int64_t t = 0; t < rank.T; ++t) {
      const std::vector<int64_t> ids = route_token(routing, world, token++);
      rank.expert_ids.insert(rank.expert_ids.end(), ids.begin(), ids.end());
    }
  }
  set_variant(variant, world);
  make_weights(world);
  return world;
}

World make_shared_world(int num_ranks) {
  constexpr int64_t kTokens = 61;
  World world;
  world.name = "shared";
  world.dtype = DType::kF32;
  world.config = {.num_experts = 13, .top_k = 5, .width = 37};
  const std::vector<int64_t> experts = all_experts(world.config.num_experts);
  // Rank r gets a share of r + 1 parts, the last rank the rest.
  const int64_t num_parts = int64_t{num_ranks} * (num_ranks + 1) / 2;
  int64_t next = 0;
  for (int r = 0; r < num_ranks; ++r) {
    reference::RankInput rank;
    rank.T = r + 1 == num_ranks ? kTokens - next : kTokens * (r + 1) / num_parts;
    for (int64_t t = 0; t < rank.T; ++t) {
      const auto ids =
          draw_experts(experts, world.config.top_k, 1, static_cast<uint64_t>(next + t));
      rank.expert_ids.insert(rank.expert_ids.end(), ids.begin(), ids.end());
    }
    next += rank.T;
    world.ranks.push_back(std::move(rank));
  }
  make_weights(world);
  return world;
}

World make_small_world(const std::vector<int64_t>& tokens_per_rank, int64_t width, uint64_t seed) {
  World world;
  world.name = "small";
  world.config = {.num_experts = std::ssize(tokens_per_rank) + 2, .top_k = 3, .width = width};
  const std::vector<int64_t> experts = all_experts(world.config.num_experts);
  uint64_t token = 0;
  for (const int64_t num_tokens : tokens_per_rank) {
    reference::RankInput rank;
    rank.T = num_tokens;
    for (int64_t t = 0; t < num_tokens; ++t) {
      const auto ids = draw_experts(experts, world.config.top_k, 0, hash_of(seed, token++));
      rank.expert_ids.insert(rank.expert_ids.end(), ids.begin(), ids.end());
    }
    world.ranks.push_back(std::move(rank));
  }
  make_weights(world);
  return world;
}

}  // namespace crossdock::conformance
