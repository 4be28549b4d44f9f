#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"
#include "dispatch/cuda/kernels/zero_rows.cuh"

namespace crossdock::cuda {
namespace {

constexpr int kThreads = 256;

// A thread takes routes in turn.
__global__ void gather_routes_kernel(const __grid_constant__ GatherRoutesArgs args) {
  const bool has_peers = !is_poisoned(args.signals);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t route = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       route < args.num_routes; route += stride) {
    const RouteTarget target = args.targets[route];
    const bool has_row = target.rank >= 0 && has_peers;
    args.routes[route] = has_row ? args.rows.of(target.rank)[target.row] : 0.0f;
  }
  if (last_block(args.signals)) peer_barrier(args.signals, Operation::kRouteValues);
}

}  // namespace

void load_gather_routes() {
  load_kernels(gather_routes_kernel);
}

void launch_gather_routes(const GatherRoutesArgs& args, cudaStream_t stream) {
  const int64_t wanted = (args.num_routes + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, 256));
  gather_routes_kernel<<<blocks, kThreads, 0, stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

namespace {

__device__ void zero_rows(const PadRowsArgs& args, int64_t begin, int64_t end) {
  zero_bytes(args.rows + begin * args.row_bytes, (end - begin) * args.row_bytes);
}

// A block takes one local expert and, with pad_to_capacity, one source rank.
__global__ void pad_rows_kernel(const __grid_constant__ PadRowsArgs args) {
  const int local = static_cast<int>(blockIdx.x);
  const int source = static_cast<int>(blockIdx.y);
  const int64_t start = args.plan.local_starts[local];
  const int64_t counted_end = start + args.plan.local_counts[local];
  if (source == 0) zero_rows(args, counted_end, args.plan.local_starts[local + 1]);
  if (!args.shape.pad_to_capacity || counted_end == start) return;
  const int e = args.shape.by_owner[args.shape.owner_offsets[args.rank] + local];
  const int64_t first = start + source * args.shape.capacity;
  const int32_t used = args.plan.counts[static_cast<int64_t>(source) * args.shape.E + e];
  zero_rows(args, first + used, first + args.shape.capacity);
}

}  // namespace

void load_pad_rows() {
  load_kernels(pad_rows_kernel);
}

void launch_pad_rows(const PadRowsArgs& args, cudaStream_t stream) {
  const bool pads =
      args.shape.alignment > 1 || args.shape.pad_to_capacity || args.shape.keep_empty_segments;
  if (!pads || args.num_local == 0 || args.row_bytes == 0) return;
  const dim3 grid(static_cast<unsigned>(args.num_local),
                  static_cast<unsigned>(args.shape.pad_to_capacity ? args.P : 1));
  pad_rows_kernel<<<grid, 256, 0, stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

namespace {

// A warp takes rows in turn; a lane moves vectors of a row, or writes zeros.
template <typename Vector>
__global__ void move_rows_kernel(const MoveRowsArgs args) {
  const bool has_rows = args.signals == nullptr || !is_poisoned(*args.signals);
  const int64_t vectors = args.row_bytes / static_cast<int64_t>(sizeof(Vector));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads / 32;
  for (int64_t i = first; i < args.num_rows; i += stride) {
    const int64_t source = args.from_index != nullptr ? args.from_index[i] : i;
    const int64_t target = args.to_index != nullptr ? args.to_index[i] : i;
    const auto* from = reinterpret_cast<const Vector*>(args.from + source * args.row_bytes);
    auto* to = reinterpret_cast<Vector*>(args.to + target * args.row_bytes);
#pragma unroll 4
    for (int64_t at = lane; at < vectors; at += 32) to[at] = has_rows ? from[at] : Vector{};
  }
}

template <typename Vector>
void launch(const MoveRowsArgs& args, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 4096;
  const int64_t wanted = (args.num_rows * 32 + kThreads - 1) / kThreads;
  move_rows_kernel<Vector>
      <<<static_cast<unsigned>(std::min(wanted, kMostBlocks)), kThreads, 0, stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace

void load_move_rows() {
  load_kernels(move_rows_kernel<uint4>, move_rows_kernel<uint32_t>, move_rows_kernel<uint16_t>,
               move_rows_kernel<uint8_t>);
}

void launch_move_rows(const MoveRowsArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0 || args.row_bytes == 0) return;
  const uint64_t bits = static_cast<uint64_t>(args.row_bytes) |
                        reinterpret_cast<uint64_t>(args.from) | reinterpret_cast<uint64_t>(args.to);
  if (bits % 16 == 0) {
    launch<uint4>(args, stream);
  } else if (bits % 4 == 0) {
    launch<uint32_t>(args, stream);
  } else if (bits % 2 == 0) {
    launch<uint16_t>(args, stream);
  } else {
    launch<uint8_t>(args, stream);
  }
}

}  // namespace crossdock::cuda
