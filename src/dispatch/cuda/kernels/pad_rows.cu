#include "core/cuda/check.hpp"
#include "core/cuda/launch.hpp"
#include "dispatch/cuda/kernels/pad_rows.hpp"
#include "dispatch/cuda/kernels/zero_rows.cuh"

namespace crossdock::cuda {
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

}  // namespace crossdock::cuda
