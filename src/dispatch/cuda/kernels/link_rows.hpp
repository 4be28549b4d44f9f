#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "comm/cuda/peer_pointers.hpp"
#include "comm/cuda/peer_signals.cuh"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// Tells the owner of every row which rows belong to the same token, and each source which ranks
/// its tokens go to.
struct LinkRowsArgs {
  const RouteTarget* targets;  // [T, K]
  const float* weights;        // [T, K]
  int64_t T;
  int32_t K;
  PlanLinks links;             // of this rank; links.rank_targets is written
  PeerPointers<RowLink> rows;  // PlanLinks::rows of every rank; null if it has no target
  PeerSignals signals;
};

/// Collective; when it ends, all ranks are done. Writes the links of all rows that are targets.
/// REQUIRES: all ranks' links are free to be written. If a rank has not arrived, this rank's links
/// are all zero.
void load_link_rows();  // before the first launch
void launch_link_rows(const LinkRowsArgs& args, cudaStream_t stream);

}  // namespace crossdock::cuda
