#include <algorithm>

#include "core/cuda/check.hpp"
#include "core/cuda/launch.hpp"
#include "dispatch/cuda/kernels/move_rows.hpp"

namespace crossdock::cuda {
namespace {

constexpr int kThreads = 256;

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
