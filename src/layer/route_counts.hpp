#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/router.hpp"

namespace crossdock {

/// The statistics of a router as the body of a rendezvous, and back.
std::vector<int64_t> pack(const RouterStatistics& statistics);
RouterStatistics unpack(std::span<const std::byte> body);

/// The statistics of all ranks, one after the other.
std::vector<RouterStatistics> unpack_all(const Agreement& agreement, int num_ranks);

/// Their sum. REQUIRES at least one. Throws Error(kInvalidArgument) where ranks have different
/// numbers of sequences.
RouterStatistics sum(const std::vector<RouterStatistics>& statistics);

int64_t num_tokens(const RouterStatistics& statistics);
int64_t num_sequences_with_tokens(const RouterStatistics& statistics);

/// Throws Error(kInvalidArgument) where `earlier`, if given, cannot be added to the counts of a
/// router with this configuration (see MoeForwardArgs::earlier).
void check_earlier(const RouterConfig& config, const RouterStatistics* earlier);

}  // namespace crossdock
