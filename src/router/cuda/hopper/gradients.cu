#include <cstddef>

#include "core/cuda/launch.hpp"
#include "router/cuda/hopper/compute_grad_x.cuh"
#include "router/cuda/hopper/copy_grad_slots.cuh"
#include "router/cuda/hopper/grad_tile.cuh"
#include "router/cuda/hopper/launch_clusters.hpp"
#include "router/cuda/hopper/sum_grad_gate.cuh"

// A block has 128 columns and a slice of the tokens. It keeps its columns of the gate in shared
// memory and its sums of grad_gate in registers. Tokens pass by, 64 at a time, through three rings
// of slots: the parts of grad_logits, x, and grad_x. The warpgroups of a block:
//
//   one for each 64 experts   multiply parts^T x, and sum over the tokens of the slice
//   one                       multiplies parts by the gate, and puts results in the place of grad_x
//   one                       a warp for each ring fills it, a warp stores grad_x
//
// With more than 64 experts the two blocks of a cluster have neighbouring columns, and each loads
// half of the parts for both.
//
// The previous kernel in the stream computes the parts. It lets this one begin when it has itself
// waited for those before it, so x, the gate and grad_x are loaded while it is still running.

namespace crossdock::router::hopper {
namespace {

// A block computes its columns for one slice of the tokens.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gradients_kernel(const __grid_constant__ GradMaps maps,
                     const __grid_constant__ GradientsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte gradients_memory[];
  __shared__ GradBarriers<Tile> barriers;
  const GradPart<Tile> part(args, first_slot(gradients_memory));
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) barriers.init(args);
  if (threadIdx.x == 32) prefetch_maps(maps, args);
  __syncthreads();
  ops::hopper::sync_cluster();
  cuda::allow_next_kernel();
  if (warpgroup < Tile::kGroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kSumRegisters));
    cuda::wait_for_previous_kernel();
    if (args.grad_gate != nullptr) sum_grad_gate<Tile>(args, part, barriers);
  } else if (warpgroup == Tile::kGroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kXRegisters));
    cuda::wait_for_previous_kernel();
    if (args.computes_x) compute_grad_x<Tile>(args, part, barriers);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kCopyRegisters));
    copy_slots<Tile>(maps, args, part, barriers);
  }
  __syncwarp();                 // lanes may have diverged
  ops::hopper::sync_cluster();  // the other block may still arrive at the barriers of this one
#endif
}

template <typename Tile>
bool load_tile() {
  return load_kernel(gradients_kernel<Tile>, Tile::kSharedBytes);
}

struct GradOperands {
  GradParts parts;
  GradXArgs of_x;
  GradGateArgs of_gate;
};

template <typename Tile>
GradMaps maps_of(const GradOperands& operands, const ColumnBoxes& boxes,
                 ops::hopper::TensorMaps& maps) {
  const auto& [parts, of_x, of_gate] = operands;
  const auto T = static_cast<uint64_t>(of_x.T);
  const uint64_t part_row_bytes = static_cast<uint64_t>(parts.pitch) * 2;
  const auto map_of = [&](const void* data, int64_t num_rows) {
    if (data == nullptr) return CUtensorMap{};  // is not used
    return maps.get(boxes.spec(data, DType::kBF16, of_x.D, num_rows));
  };
  return {.parts = maps.get({.data = parts.values,
                             .dtype = DType::kBF16,
                             .rank = 3,
                             .sizes = {static_cast<uint64_t>(of_x.E), T, kNumParts},
                             .strides = {part_row_bytes, part_row_bytes * T},
                             .box = {kBlock, Tile::kTokens, kNumParts}}),
          .gate = map_of(of_x.gate, of_x.E),
          .x = map_of(of_gate.x, of_x.T),
          .grad_x = map_of(of_x.grad_x, of_x.T)};
}

template <typename Tile>
void launch(const GradOperands& operands, ops::hopper::TensorMaps& maps, cudaStream_t stream) {
  const auto& [parts, of_x, of_gate] = operands;
  const TokenSlices slices = of_gate.slices;
  const bool is_one = slices.count == 1;
  const bool has_gate = of_gate.grad_gate != nullptr;
  const GradientsArgs args{
      .sequences = of_gate.sequences,
      .T = of_x.T,
      .E = of_x.E,
      .D = of_x.D,
      .slices = slices,
      .boxes = ColumnBoxes::of(of_x.D, kBlock, Tile::kColumnBlocks),
      .computes_x = of_x.grad_x != nullptr,
      .accumulates_x = of_x.accumulates,
      .grad_gate = has_gate && !is_one ? of_gate.slice_sums : of_gate.grad_gate,
      .accumulates_gate = is_one && of_gate.accumulates};
  launch_clusters(gradients_kernel<Tile>,
                  {.cluster_size = Tile::kShares ? kClusterSize : 1,
                   .across = (args.D + Tile::kColumns - 1) / Tile::kColumns,
                   .down = slices.count,
                   .threads = Tile::kThreads,
                   .shared_bytes = Tile::kSharedBytes},
                  stream, maps_of<Tile>(operands, args.boxes, maps), args);
}

}  // namespace

bool load_gradients() {
  return load_tile<GradTile<1, 2>>() && load_tile<GradTile<1, 4>>() && load_tile<GradTile<2, 8>>();
}

void launch_gradients(const GradParts& parts, const GradXArgs& of_x, const GradGateArgs& of_gate,
                      ops::hopper::TensorMaps& maps, cudaStream_t stream) {
  const GradOperands operands{parts, of_x, of_gate};
  if (of_x.E <= 32) {
    launch<GradTile<1, 2>>(operands, maps, stream);
  } else if (of_x.E <= 64) {
    launch<GradTile<1, 4>>(operands, maps, stream);
  } else {
    static_assert(kMostExpertsInParts == 128);
    launch<GradTile<2, 8>>(operands, maps, stream);
  }
  if (of_gate.grad_gate != nullptr) launch_sum_gate(of_gate, stream);
}

}  // namespace crossdock::router::hopper
