#pragma once

#include <span>
#include <vector>

#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// Throws unless `offsets` has P + 1 non-negative, ascending entries within `bytes`.
void check_blocks(const char* name, const SharedBytes& bytes, std::span<const int64_t> offsets,
                  int size);

/// Like check_blocks, for the received blocks of an all_gather_v; this rank's block must have the
/// size of its send.
void check_gather(const SharedBytes& send, const SharedBytes& recv,
                  std::span<const int64_t> recv_offsets, int rank, int size);

/// Throws unless `members` are ranks in [0, size), ascending, including `rank`.
void check_members(std::span<const int> members, int rank, int size);

/// The index of `rank` in `members`.
int rank_among(std::span<const int> members, int rank);

/// Counts num_bytes that this rank sends to `peer`.
void count_bytes(Traffic& traffic, const Topology& topology, int rank, int peer, int64_t num_bytes);

}  // namespace crossdock::comm
