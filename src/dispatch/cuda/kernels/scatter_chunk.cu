#include <algorithm>

#include "core/cuda/launch.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "dispatch/cuda/kernels/zero_rows.cuh"

namespace crossdock::cuda {
namespace {

constexpr int kWholeSmThreads =
    1024;  // with more than 32 registers each, a second block does not fit
constexpr int kSmallThreads = 256;
constexpr int kInFlight = 8;  // vectors of a lane: a row of 4 KiB at once

__device__ bool holds(const ChunkRows& chunk, const RouteTarget& target) {
  if (chunk.segment_starts == nullptr) return true;
  const int32_t first = chunk.first[target.rank];
  const int32_t end = chunk.end[target.rank];
  return first >= 0 && target.row >= chunk.segment_starts[first] &&
         (end < 0 || target.row < chunk.segment_starts[end]);
}

// The target of a route; rank -1 if there is nothing to send.
__device__ RouteTarget read_target(const ScatterChunkArgs& args, int64_t route) {
  RouteTarget target = args.scatter.targets[route];
  if (is_poisoned(args.scatter.signals)) target.rank = -1;
  if (target.rank >= 0 && !holds(args.rows, target)) target.rank = -1;
  return target;
}

// Copies row `token` of one part to the targets of the lanes in `sent`. Called by a whole warp.
template <typename Vector>
__device__ void copy_row(const ScatterPart& part, int64_t token, const RouteTarget& target,
                         uint32_t sent) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t vectors = part.row_bytes / static_cast<int64_t>(sizeof(Vector));
  const auto* from = reinterpret_cast<const Vector*>(part.tokens + token * part.row_bytes) + lane;
  for (int64_t first = 0; first < vectors; first += 32 * kInFlight) {
    const int64_t left = vectors - first - lane;  // from this lane's first vector on
    Vector values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (i * 32 < left) values[i] = from[first + i * 32];
    }
    for (uint32_t lanes = sent; lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(static_cast<int>(lanes)) - 1;
      const int32_t rank = __shfl_sync(~0u, target.rank, source);
      const int64_t row = __shfl_sync(~0u, target.row, source);
      auto* to =
          reinterpret_cast<Vector*>(part.rows.of(rank) + row * part.row_bytes) + lane + first;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (i * 32 < left) __stcs(to + i * 32, values[i]);
      }
    }
  }
}

// A warp takes tokens in turn; a lane holds the target of a slot and moves vectors of a row. If a
// peer has not arrived, the kernel scatters nothing.
template <typename Vector>
__global__ void __launch_bounds__(kWholeSmThreads, 1)
    scatter_chunk_kernel(const __grid_constant__ ScatterChunkArgs args) {
  const ScatterArgs& scatter = args.scatter;
  wait_for_previous_kernel();
  if (scatter.awaits_peers) peer_arrival(scatter.signals, scatter.operation);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / 32;
  for (int64_t token = thread / 32; token < scatter.T; token += num_warps) {
    for (int first = 0; first < scatter.K; first += 32) {
      const int64_t route = token * scatter.K + first + lane;
      RouteTarget target{-1, -1};
      if (first + lane < scatter.K) target = read_target(args, route);
      if (scatter.weights != nullptr && target.rank >= 0) {
        scatter.row_weights.of(target.rank)[target.row] = scatter.weights[route];
      }
      const uint32_t sent = __ballot_sync(~0u, target.rank >= 0);
      if (sent == 0) continue;
      for (int i = 0; i < scatter.num_parts; ++i) {
        copy_row<Vector>(scatter.parts[i], token, target, sent);
      }
    }
  }
  if (last_block(scatter.signals) &&
      !peer_barrier(scatter.signals, scatter.operation, scatter.awaits_peers)) {
    zero_own_parts(scatter);
  }
}

template <typename Vector>
void launch(const ScatterChunkArgs& args, int sms, cudaStream_t stream) {
  const int threads = args.takes_whole_sms ? kWholeSmThreads : kSmallThreads;
  const int64_t most = sms > 0 ? int64_t{sms} * kWholeSmThreads / threads : int64_t{1} << 30;
  const int64_t warps = threads / 32;
  const auto blocks =
      static_cast<unsigned>(std::clamp<int64_t>((args.scatter.T + warps - 1) / warps, 1, most));
  launch_early(scatter_chunk_kernel<Vector>, blocks, static_cast<unsigned>(threads), stream, args);
}

}  // namespace

void load_scatter_chunk() {
  load_kernels(scatter_chunk_kernel<uint4>, scatter_chunk_kernel<uint32_t>,
               scatter_chunk_kernel<uint16_t>, scatter_chunk_kernel<uint8_t>);
}

void launch_scatter_chunk(const ScatterChunkArgs& args, int sms, cudaStream_t stream) {
  const int64_t bytes = vector_bytes(args.scatter);
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
