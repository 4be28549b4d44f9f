#pragma once

#include <span>
#include <vector>

#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// Throws unless `offsets` has P + 1 entries, ascending from at least 0, and `bytes` holds them.
void check_blocks(const char* name, const SharedBytes& bytes, std::span<const int64_t> offsets,
                  int size);

/// As check_blocks for what an all_gather_v receives; this rank's block must have the size of what
/// it sends.
void check_gather(const SharedBytes& send, const SharedBytes& recv,
                  std::span<const int64_t> recv_offsets, int rank, int size);

/// Throws unless `members` are ranks of 0 ... size - 1, ascending, with `rank` among them.
void check_members(std::span<const int> members, int rank, int size);

/// Place of `rank` among `members`.
int rank_among(std::span<const int> members, int rank);

/// Adds what this rank sends to `peer`.
void count_bytes(Traffic& traffic, const Topology& topology, int rank, int peer, int64_t num_bytes);

}  // namespace crossdock::comm
