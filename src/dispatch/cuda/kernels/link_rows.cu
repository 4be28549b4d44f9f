#include <algorithm>

#include "core/cuda/device.hpp"
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

namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 2;
constexpr int kInFlight = 8;    // vectors of a lane: 4 KiB of a row at once
constexpr int kRowsAtOnce = 4;  // written per read of the token
constexpr int kMostRowsPerTask = 8;

// Rows that a token is copied to; the first `count` are valid.
struct CopyRows {
  int32_t rows[kRowsAtOnce];
  int count;

  // Takes rows from `next` on, and advances `next` past them.
  __device__ CopyRows(const RowLink* links, int32_t& next) : count(0) {
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      rows[i] = next;
      if (next < 0) continue;
      ++count;
      next = links[next].next();
    }
  }
};

// A warp copies row `source` to `copies`.
template <typename Vector>
__device__ void copy_row(const FanOutPart& part, int64_t source, const CopyRows& copies) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t vectors = part.row_bytes / static_cast<int64_t>(sizeof(Vector));
  const auto* from = reinterpret_cast<const Vector*>(part.rows + source * part.row_bytes);
  for (int64_t first = lane; first < vectors; first += 32 * kInFlight) {
    Vector values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * 32 < vectors) values[i] = from[first + i * 32];
    }
#pragma unroll
    for (int copy = 0; copy < kRowsAtOnce; ++copy) {
      if (copy >= copies.count) break;
      auto* to = reinterpret_cast<Vector*>(part.rows + copies.rows[copy] * part.row_bytes);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (first + i * 32 < vectors) __stcs(to + first + i * 32, values[i]);
      }
    }
  }
}

__device__ void copy_part(const FanOutPart& part, int64_t source, const CopyRows& copies) {
  const uint64_t bits =
      static_cast<uint64_t>(part.row_bytes) | reinterpret_cast<uint64_t>(part.rows);
  if (bits % 16 == 0) {
    copy_row<uint4>(part, source, copies);
  } else if (bits % 4 == 0) {
    copy_row<uint32_t>(part, source, copies);
  } else if (bits % 2 == 0) {
    copy_row<uint16_t>(part, source, copies);
  } else {
    copy_row<uint8_t>(part, source, copies);
  }
}

__device__ void zero_rows(const FanOutArgs& args, int64_t num_rows) {
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    for (int i = 0; i < args.num_parts; ++i) {
      zero_bytes(args.parts[i].rows + row * args.parts[i].row_bytes, args.parts[i].row_bytes);
    }
    if (args.row_weights != nullptr && threadIdx.x == 0) args.row_weights[row] = 0.0f;
  }
}

// A warp takes ranges of rows in turn. Each lane reads the link of one row; then the warp copies
// the first row of each token to the token's other rows.
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerSm)
    fan_out_kernel(const __grid_constant__ FanOutArgs args, int rows_per_task) {
  wait_for_previous_kernel();
  const int64_t num_rows = min(*args.rows_in_use, args.links.num_rows);
  if (is_poisoned(*args.signals)) return zero_rows(args, num_rows);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first_task = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps * rows_per_task;
  for (int64_t begin = first_task * rows_per_task; begin < num_rows; begin += stride) {
    RowLink link{};
    if (lane < rows_per_task && begin + lane < num_rows) {
      link = args.links.rows[begin + lane];
      if (args.row_weights != nullptr) args.row_weights[begin + lane] = link.weight;
    }
    uint32_t to_copy = __ballot_sync(~0u, link.is_first() && link.next() >= 0);
    while (to_copy != 0) {
      const int place = __ffs(static_cast<int>(to_copy)) - 1;
      to_copy &= to_copy - 1;
      int32_t next = __shfl_sync(~0u, link.next(), place);
      while (next >= 0) {
        const CopyRows copies(args.links.rows, next);
        for (int i = 0; i < args.num_parts; ++i) copy_part(args.parts[i], begin + place, copies);
      }
    }
  }
}

}  // namespace

void load_fan_out() {
  load_kernels(fan_out_kernel);
}

void launch_fan_out(const FanOutArgs& args, int sms, cudaStream_t stream) {
  if (args.links.num_rows == 0) return;
  if (sms == 0) sms = num_sms(current_device());
  const int64_t most_warps = int64_t{sms} * kBlocksPerSm * kWarps;
  const auto rows_per_task =
      static_cast<int>(std::clamp<int64_t>(args.links.num_rows / most_warps, 1, kMostRowsPerTask));
  const int64_t tasks = (args.links.num_rows + rows_per_task - 1) / rows_per_task;
  const int64_t blocks = std::min((tasks + kWarps - 1) / kWarps, int64_t{sms} * kBlocksPerSm);
  launch_early(fan_out_kernel, static_cast<unsigned>(blocks), kWarps * 32, stream, args,
               rows_per_task);
}

}  // namespace crossdock::cuda
