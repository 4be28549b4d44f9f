#include <algorithm>

#include "core/cuda/launch.hpp"
#include "core/cuda/load_kernels.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "dispatch/cuda/kernels/zero_rows.cuh"

// Writing dominates, and scattered rows are fastest when each is written in one go: a block holds a
// whole token in registers and stores it row by row, with streaming stores (first to leave the L2
// cache). Blocks end with their token, which keeps more stores in flight than persistent blocks;
// measured against warps per token and bulk copies through shared memory.
//
// Memory loses time whenever it switches between reads and writes, so tokens are read in bursts:
// some blocks prefetch the tokens of the next burst into the L2 cache, one after the other, and the
// rest of the time memory is only written.

namespace crossdock::cuda {
namespace {

constexpr int kThreads = 128;  // of a team, which moves one token at a time
constexpr int kInFlight = 8;   // vectors of a thread: a row of 16 KiB at once
constexpr int kSlotsAtOnce = 32;
constexpr int kTeamsPerSm = 8;
constexpr int64_t kBurstBytes = int64_t{7} << 20;  // two bursts are a quarter of an H200's L2 cache
constexpr int kPrefetchRows = 4;                   // prefetched by one block

/// The threads that move a token together: a block, or with kTeams > 1 an equal part of one.
template <int kTeams>
struct Team {
  int in_block = static_cast<int>(threadIdx.x) / kThreads;
  int thread = static_cast<int>(threadIdx.x) % kThreads;  // of this team
  int64_t index = int64_t{blockIdx.x} * kTeams + in_block;
  int64_t count = int64_t{gridDim.x} * kTeams;  // teams of the grid

  __device__ void wait() const {
    if constexpr (kTeams == 1) {
      __syncthreads();
    } else {  // barrier 0 is the block's
      asm volatile("barrier.cta.sync %0, %1;" ::"r"(in_block + 1), "n"(kThreads) : "memory");
    }
  }

  /// Waits; returns whether `value` is true for any thread of the team.
  __device__ bool any(bool value) const {
    if constexpr (kTeams == 1) {
      return __syncthreads_or(value ? 1 : 0) != 0;
    } else {
      uint32_t result;
      asm volatile(
          "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; "
          "selp.u32 %0, 1, 0, q; }"
          : "=r"(result)
          : "r"(value ? 1u : 0u), "r"(in_block + 1), "n"(kThreads)
          : "memory");
      return result != 0;
    }
  }
};

__device__ bool holds(const ScatterChunk& chunk, const RouteTarget& target) {
  if (chunk.segment_starts == nullptr) return true;
  const int32_t first = chunk.first[target.rank];
  const int32_t end = chunk.end[target.rank];
  return (first >= 0 && target.row >= chunk.segment_starts[first]) &&
         (end < 0 || target.row < chunk.segment_starts[end]);
}

__device__ void prefetch_to_l2(const std::byte* from, int64_t num_bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from),
               "r"(static_cast<uint32_t>(num_bytes))
               : "memory");
#endif
}

// The first teams of a burst of `burst` tokens prefetch the next burst. With burst 1, persistent
// teams each prefetch their own next token. 0: no prefetch.
template <int kTeams>
__device__ void prefetch_next(const ScatterArgs& args, const Team<kTeams>& team, int64_t burst,
                              int64_t token) {
  if (burst == 0 || team.thread >= kPrefetchRows) return;
  const int64_t place = token % burst * kPrefetchRows + team.thread;
  const int64_t ahead = burst == 1 ? token + team.count : (token / burst + 1) * burst + place;
  if (place >= burst || ahead >= args.T) return;
  const ScatterPart& part = args.parts[0];
  prefetch_to_l2(part.tokens + ahead * part.row_bytes, part.row_bytes);
}

// Copies row `token` of one part to `slots` targets, with a team.
template <typename Vector>
__device__ void copy_row(const ScatterPart& part, int64_t token, const RouteTarget* targets,
                         int slots, int thread) {
  const int64_t vectors = part.row_bytes / static_cast<int64_t>(sizeof(Vector));
  const auto* from = reinterpret_cast<const Vector*>(part.tokens + token * part.row_bytes);
  for (int64_t first = thread; first < vectors; first += kThreads * kInFlight) {
    Vector values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < vectors) values[i] = __ldcs(from + first + i * kThreads);
    }
    for (int slot = 0; slot < slots; ++slot) {
      const RouteTarget target = targets[slot];
      if (target.rank < 0) continue;
      auto* to = reinterpret_cast<Vector*>(part.rows[target.rank] + target.row * part.row_bytes);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (first + i * kThreads < vectors) __stcs(to + first + i * kThreads, values[i]);
      }
    }
  }
}

// Zeroes the rows of this rank's routes to itself, with one block.
__device__ void zero_own_parts(const ScatterArgs& args) {
  const int own = args.signals.rank;
  const int64_t num_routes = args.T * args.K;
  for (int i = 0; i < args.num_parts; ++i) {
    const ScatterPart& part = args.parts[i];
    zero_own_rows(args.targets, num_routes, own, part.rows[own], part.row_bytes);
  }
  if (args.weights == nullptr) return;
  auto* row_weights = reinterpret_cast<std::byte*>(args.row_weights[own]);
  zero_own_rows(args.targets, num_routes, own, row_weights, sizeof(float));
}

// The target of a route; rank -1 if there is nothing to send.
__device__ RouteTarget read_target(const ScatterArgs& args, int64_t route) {
  RouteTarget target = args.targets[route];
  if (is_poisoned(args.signals)) target.rank = -1;
  if (target.rank >= 0 && !holds(args.chunk, target)) target.rank = -1;
  return target;
}

// A team takes tokens in turn; a thread moves vectors of a row. Rows of every part are a multiple
// of Vector. If a peer has not arrived, the kernel scatters nothing.
template <typename Vector, int kTeams>
__global__ void __launch_bounds__(kThreads* kTeams, kTeamsPerSm / kTeams)
    scatter_kernel(const __grid_constant__ ScatterArgs args, int64_t burst) {
  __shared__ RouteTarget targets_of_teams[kTeams][kSlotsAtOnce];
  const Team<kTeams> team;
  RouteTarget* const targets = targets_of_teams[team.in_block];
  wait_for_previous_kernel();
  if (args.awaits_peers) peer_arrival(args.signals, args.operation);
  for (int64_t token = team.index; token < args.T; token += team.count) {
    prefetch_next(args, team, burst, token);
    for (int first = 0; first < args.K; first += kSlotsAtOnce) {
      const int slots = min(args.K - first, kSlotsAtOnce);
      const int64_t route = token * args.K + first + team.thread;
      bool is_sent = false;
      if (team.thread < slots) {
        const RouteTarget target = read_target(args, route);
        is_sent = target.rank >= 0;
        targets[team.thread] = target;
        if (args.weights != nullptr && is_sent) {
          args.row_weights[target.rank][target.row] = args.weights[route];
        }
      }
      if (!team.any(is_sent)) continue;
      for (int i = 0; i < args.num_parts; ++i) {
        copy_row<Vector>(args.parts[i], token, targets, slots, team.thread);
      }
      team.wait();
    }
  }
  if (last_block(args.signals) && !peer_barrier(args.signals, args.operation, args.awaits_peers)) {
    zero_own_parts(args);
  }
}

// The largest vector, up to 16 bytes, that divides every row and address.
int64_t vector_bytes(const ScatterArgs& args) {
  uint64_t bits = 16;
  for (int i = 0; i < args.num_parts; ++i) {
    const ScatterPart& part = args.parts[i];
    bits |= static_cast<uint64_t>(part.row_bytes) | reinterpret_cast<uint64_t>(part.tokens);
    for (const std::byte* rows : part.rows) bits |= reinterpret_cast<uint64_t>(rows);
  }
  return static_cast<int64_t>(bits & -bits);
}

template <typename Vector, int kTeams>
void launch_teams(const ScatterArgs& args, int sms, cudaStream_t stream) {
  const int64_t most = sms > 0 ? int64_t{sms} * kTeamsPerSm / kTeams : int64_t{1} << 30;
  const auto blocks =
      static_cast<unsigned>(std::clamp<int64_t>((args.T + kTeams - 1) / kTeams, 1, most));
  const int64_t row_bytes = args.parts[0].row_bytes;
  int64_t burst = 0;
  if (sizeof(Vector) == 16 && row_bytes < kBurstBytes) {
    burst = sms > 0 ? 1 : std::max<int64_t>(kBurstBytes / row_bytes, 2);
  }
  launch_early(scatter_kernel<Vector, kTeams>, blocks, kThreads * kTeams, stream, args, burst);
}

template <typename Vector>
void launch(const ScatterArgs& args, int sms, cudaStream_t stream) {
  if (args.takes_whole_sms) {
    launch_teams<Vector, kTeamsPerSm>(args, sms, stream);
  } else {
    launch_teams<Vector, 1>(args, sms, stream);
  }
}

template <typename Vector>
void load() {
  load_kernels(scatter_kernel<Vector, 1>, scatter_kernel<Vector, kTeamsPerSm>);
}

}  // namespace

void load_scatter() {
  load<uint4>();
  load<uint32_t>();
  load<uint16_t>();
  load<uint8_t>();
}

void launch_scatter(const ScatterArgs& args, int sms, cudaStream_t stream) {
  const int64_t bytes = vector_bytes(args);
  if (bytes == 16) {
    launch<uint4>(args, sms, stream);
  } else if (bytes >= 4) {
    launch<uint32_t>(args, sms, stream);
  } else if (bytes == 2) {
    launch<uint16_t>(args, sms, stream);
  } else {
    launch<uint8_t>(args, sms, stream);
  }
}

}  // namespace crossdock::cuda
