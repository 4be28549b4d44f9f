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

}  // namespace crossdock
