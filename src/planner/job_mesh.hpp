#pragma once

#include "crossdock/extend/communicator.hpp"
#include "crossdock/mesh.hpp"
#include "crossdock/planner.hpp"

namespace crossdock {

/// The mesh of the job's ranks. Throws an Error(kInvalidArgument) that names the rule they break.
MeshLayout make_mesh(const JobDescription& job);

/// Throws an Error(kInvalidArgument) that names the rule that the job's tokens break.
void check_tokens(const JobDescription& job);

/// The number of tokens per rank; if it differs, the largest.
int64_t tokens_of_rank(const JobDescription& job);

/// The nodes of the group that exchanges rows and spans the most nodes (the first one if several).
/// Ranks are numbered node by node.
Topology widest_row_group(const MeshLayout& layout, int64_t ranks_per_node);

}  // namespace crossdock
