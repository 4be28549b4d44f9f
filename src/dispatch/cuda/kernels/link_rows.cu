#include <algorithm>

#include "core/cuda/launch.hpp"
#include "dispatch/cuda/kernels/link_rows.hpp"
#include "dispatch/cuda/kernels/zero_rows.cuh"

namespace crossdock::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

// A set of ranks.
struct RankSet {
  static_assert(kMaxPeers <= 128);
  uint64_t low = 0;
  uint64_t high = 0;

  __device__ void add(int rank) {
    if (rank < 64) {
      low |= uint64_t{1} << rank;
    } else {
      high |= uint64_t{1} << (rank - 64);
    }
  }
  __device__ int size() const { return __popcll(low) + __popcll(high); }
  __device__ int num_below(int rank) const {
    if (rank < 64) return __popcll(low & ((uint64_t{1} << rank) - 1));
    return __popcll(low) + __popcll(high & ((uint64_t{1} << (rank - 64)) - 1));
  }
};

// Links one route's row to the token's next row on the same rank.
__device__ void link_route(const LinkRowsArgs& args, int64_t route) {
  const auto slot = static_cast<int>(route % args.K);
  const int64_t first_route = route - slot;
  const RouteTarget target = args.targets[route];
  RankSet ranks;
  bool is_first = true;
  int32_t next = -1;
  for (int other_slot = 0; other_slot < args.K; ++other_slot) {
    const RouteTarget other = args.targets[first_route + other_slot];
    if (other.rank < 0) continue;
    ranks.add(other.rank);
    if (other.rank != target.rank) continue;
    if (other_slot < slot) is_first = false;
    if (other_slot > slot && next < 0) next = other.row;
  }
  if (slot >= ranks.size()) args.links.rank_targets[route] = {-1, -1};
  if (target.rank < 0) return;
  if (is_first) {
    args.links.rank_targets[first_route + ranks.num_below(target.rank)] = target;
  }
  if (is_poisoned(args.signals)) return;
  args.rows.of(target.rank)[target.row] = {
      static_cast<uint32_t>(next + 1) | (is_first ? RowLink::kFirst : 0), args.weights[route]};
}

// A thread takes routes in turn.
__global__ void __launch_bounds__(kThreads)
    link_rows_kernel(const __grid_constant__ LinkRowsArgs args) {
  wait_for_previous_kernel();
  const int64_t num_routes = args.T * args.K;
  for (int64_t route = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       route < num_routes; route += static_cast<int64_t>(gridDim.x) * kThreads) {
    link_route(args, route);
  }
  if (!last_block(args.signals)) return;
  const bool has_sent = peer_barrier(args.signals, Operation::kPlan);
  if (has_sent && !is_poisoned(args.signals)) return;
  // Work in other streams may follow the links without knowing of the failure.
  zero_bytes(reinterpret_cast<std::byte*>(args.links.rows),
             args.links.num_rows * static_cast<int64_t>(sizeof(RowLink)));
}

}  // namespace

void load_link_rows() {
  load_kernels(link_rows_kernel);
}

void launch_link_rows(const LinkRowsArgs& args, cudaStream_t stream) {
  const int64_t wanted = (args.T * args.K + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kMostBlocks));
  launch_early(link_rows_kernel, blocks, kThreads, stream, args);
}

}  // namespace crossdock::cuda
