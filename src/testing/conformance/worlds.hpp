#pragma once

#include <array>
#include <string_view>

#include "crossdock/testing/conformance.hpp"

namespace crossdock::conformance {

/// How many routes go from which ranks to which experts.
enum class RoutingKind : uint8_t {
  kBalanced,
  kSkewed,
  kOneExpertTakesAll,
  kRankReceivesNothing,
  kRankHasNoTokens,
  kNoTokens,
  kAbsentRoutes,   // slots of -1, and tokens with no other slots
  kUnequalCounts,  // a different T on every rank
  kRankWithoutExperts
};

inline constexpr std::array<std::string_view, 9> kRoutingNames = {"balanced",
                                                                  "skewed",
                                                                  "one_expert_takes_all",
                                                                  "rank_receives_nothing",
                                                                  "rank_has_no_tokens",
                                                                  "no_tokens",
                                                                  "absent_routes",
                                                                  "unequal_counts",
                                                                  "rank_without_experts"};

/// Settings other than the routing.
enum class Variant : uint8_t {
  kPlain,
  kAlignment,
  kCapacityPosition,
  kCapacityWeight,
  kPadToCapacity,
  kPlacement,
  kPartialSums,
  kDenseMap,
  kMask,
  kWideIds,
  kAnyBits,      // a dense map with 0 to E bits per token
  kBoundedBits,  // the same, with max_routes_per_token
  kPartialSumsInRowType
};

inline constexpr std::array<std::string_view, 13> kVariantNames = {"plain",
                                                                   "alignment",
                                                                   "capacity_position",
                                                                   "capacity_weight",
                                                                   "pad_to_capacity",
                                                                   "placement",
                                                                   "partial_sums",
                                                                   "dense_map",
                                                                   "mask",
                                                                   "wide_ids",
                                                                   "any_bits",
                                                                   "bounded_bits",
                                                                   "partial_sums_in_row_type"};

/// A world for `num_ranks` ranks, identical in every call.
World make_world(RoutingKind routing, Variant variant, DType dtype, int num_ranks);

/// Tokens and routes that do not depend on the number of ranks, divided unevenly among them.
World make_shared_world(int num_ranks);

/// A world in fp32 with these tokens per rank, P + 2 experts and 3 routes per token.
World make_small_world(const std::vector<int64_t>& tokens_per_rank, int64_t width, uint64_t seed);

}  // namespace crossdock::conformance
