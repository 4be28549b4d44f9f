#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/plan.hpp"

namespace crossdock {

/// Which rank owns which expert.
struct Placement {
  std::vector<int32_t> owner;             // [E] expert -> rank
  std::vector<int32_t> experts_by_owner;  // [E] experts by (owner, expert)
  std::vector<int64_t> owner_offsets;     // [P + 1] into experts_by_owner
};

/// The configured placement, or the default one. REQUIRES: a valid configuration.
Placement make_placement(const DispatchConfig& config, int num_ranks);

/// The rank through which rank `source` sends to rank `destination` on another node.
using Gateway = std::function<int(int source, int destination)>;

/// Every destination is its own gateway: a token with several experts on one rank is sent once.
int gateway_is_destination(int source, int destination);

/// One gateway per (source, node): the rank whose index on its node is the source's index on its
/// own (modulo the node's size). This spreads the work over all ranks.
Gateway gateway_per_node(const Topology& topology);

/// The number of chunks, at most `num_chunks`, into which the local experts of every rank are
/// divided: at least one, and no more than the largest number of local experts of any rank.
int64_t count_chunks(const PlanData& plan, int64_t num_chunks);

/// The first of a rank's local experts in chunk `chunk` of `count`; for chunk == count, its number
/// of experts. Chunks are about equal in size. Needs only the placement from the plan.
int64_t first_expert_of_chunk(const PlanData& plan, int rank, int64_t chunk, int64_t count);

/// Splits the local experts of every rank into count_chunks chunks. Not collective.
std::vector<ExpertChunk> split_experts(const PlanData& plan, int64_t num_chunks);

/// The number of routes of this rank to the experts of a chunk.
int64_t rows_sent(const PlanData& plan, const ExpertChunk& chunk);

}  // namespace crossdock
