#pragma once

#include <functional>
#include <memory>
#include <span>

#include "dispatch/cuda/exchange_plan.hpp"
#include "dispatch/cuda/row_transport.hpp"
#include "dispatch/path.hpp"

namespace crossdock::cuda {

/// The rows that a strategy exchanges. Default: one per route, as in alltoall. At most one of the
/// first two is set.
struct Packing {
  /// All tokens go to every rank, as with allgather. Returns [received] the token of every arrival,
  /// numbered as on its source.
  std::function<std::span<const int64_t>(const Plan& host_plan)> arrival_tokens{};
  /// Only copies between nodes are exchanged, as with direct; within a node rows are written and
  /// read in place. Collective.
  std::function<RelayPlan(CudaRank& rank, const Plan& host_plan)> relay{};
  /// Which rows are summed where, with partial sums.
  std::function<PartialSumLists(const CudaRank& rank, const Plan& host_plan)> sum_lists{};
};

/// Exchanges through a transport that waits for its peers itself, as NCCL does.
using MakeTransport = std::function<std::unique_ptr<RowTransport>(CudaRank& rank)>;

/// A path that packs rows by destination, exchanges them through a transport and unpacks them. It
/// makes plans on the host, where the sizes of exchanges are needed.
///
/// Without `make_transport`, it exchanges through context.options.nccl_comm if given, else through
/// peers' memory. If that is unreachable: between processes on several nodes through the library's
/// own NCCL communicator, otherwise through host memory. REQUIRES then: no relay, or GPUs of a node
/// reach each other's memory.
std::unique_ptr<Path> make_packed_path(const PathContext& context, int device,
                                       const Packing& packing,
                                       const MakeTransport& make_transport = {});

}  // namespace crossdock::cuda
