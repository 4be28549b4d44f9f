#include <algorithm>
#include <array>
#include <cstddef>

#include "core/cuda/check.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/load_kernels.hpp"
#include "core/sizes.hpp"
#include "ops/cuda/hopper/tma.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "ops/gemm.hpp"
#include "router/cuda/hopper/grad_gate.hpp"
#include "router/cuda/hopper/slot_ring.cuh"

// grad_gate = grad_logits^T x, where grad_logits is the sum of three parts in bf16. A block sums
// some columns of x over a slice of the tokens, for up to 128 experts. One thread loads: its
// columns of x, and half of the parts for both blocks of the cluster, whose columns are neighbours.
// A warpgroup multiplies for 64 experts.

namespace crossdock::router::hopper {
namespace {

using ops::hopper::BoxTarget;
using ops::hopper::kBlock;
using ops::hopper::SharedAddress;

constexpr int kTokens = 32;  // of a step
constexpr int kSharedBytes = 200 << 10;

/// Two warpgroups, side by side or one below the other: 64 experts x 128 columns each.
template <int expert_groups>
struct GateTile {
  static constexpr int kExpertGroups = expert_groups;
  static constexpr int kColumnGroups = 2 / expert_groups;
  static constexpr int kExperts = kExpertGroups * kBlock;
  static constexpr int kGroupColumns = 2 * kBlock;
  static constexpr int kColumns = kColumnGroups * kGroupColumns;
  static constexpr int kColumnBlocks = kColumns / kBlock;
  static constexpr int kMathThreads = 256;
  static constexpr int kThreads = kMathThreads + 32;
  // A slot has for each group of experts and each half of the tokens the parts of 16 tokens x 64
  // experts, then blocks of kTokens tokens x 64 columns.
  static constexpr int kPartBytes = kTokens / 2 * 128;
  static constexpr int kHalfBytes = kNumParts * kPartBytes;
  static constexpr int kGroupBytes = 2 * kHalfBytes;
  static constexpr int kPartsBytes = kExpertGroups * kGroupBytes;
  static constexpr int kXBlockBytes = kTokens * 128;
  static constexpr int kSlotBytes = kPartsBytes + kColumnBlocks * kXBlockBytes;
  static constexpr int kSlots = std::min((kSharedBytes - kSlotAlignment) / kSlotBytes, kMostSlots);
  static_assert(kPartBytes % kSlotAlignment == 0 && kSlotBytes % kSlotAlignment == 0);
};

struct GateMaps {
  CUtensorMap parts;  // boxes of 64 experts x 16 tokens x 3 parts
  CUtensorMap x;      // boxes of 64 columns x kTokens
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// A block's part of the product.
struct GatePart {
  int expert;  // the first one
  int column;
  int begin;  // tokens
  int end;

  template <typename Tile>
  static __device__ GatePart of(const GradGateArgs& args) {
    const auto tile = static_cast<int>(blockIdx.x);
    const int across = static_cast<int>(gridDim.x) /
                       ((static_cast<int>(args.E) + Tile::kExperts - 1) / Tile::kExperts);
    const int64_t begin = blockIdx.y * args.slices.num_tokens;
    return {tile / across * Tile::kExperts, tile % across * Tile::kColumns, static_cast<int>(begin),
            static_cast<int>(min(begin + args.slices.num_tokens, args.T))};
  }
};

/// The loader, by one thread.
template <typename Tile>
__device__ void load_slots(const GateMaps& maps, const GatePart& part, SlotBarriers& barriers,
                           SharedAddress slots) {
  const int rank = ops::hopper::cluster_rank();
  SlotPlace ring{Tile::kSlots};
  for (int token = part.begin; token < part.end; token += kTokens) {
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], Tile::kSlotBytes);
    const SharedAddress slot = slots + ring.slot * Tile::kSlotBytes;
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      const SharedAddress to = slot + Tile::kPartsBytes + block * Tile::kXBlockBytes;
      ops::hopper::load_box(&maps.x, BoxTarget{to, full, false}, part.column + block * kBlock,
                            token);
    }
#pragma unroll
    for (int group = 0; group < Tile::kExpertGroups; ++group) {
      const SharedAddress to = slot + group * Tile::kGroupBytes + rank * Tile::kHalfBytes;
      ops::hopper::load_box(&maps.parts, BoxTarget{to, full, true}, part.expert + group * kBlock,
                            token + rank * (kTokens / 2), 0);
    }
    ring.advance();
  }
}

/// Zeroes rows of x in a slot, one for each bit of `padding`. By all threads that multiply.
template <typename Tile>
__device__ void zero_padding(uint32_t padding, std::byte* slot) {
  constexpr int kPieces = 128 / 16;
  std::byte* const x = slot + Tile::kPartsBytes;
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kColumnBlocks * kTokens * kPieces;
       i += Tile::kMathThreads) {
    const int row = i / kPieces % kTokens;
    if ((padding >> row & 1) != 0) *reinterpret_cast<uint4*>(x + i * 16) = uint4{};
  }
  publish_shared_memory();
  sync_math<Tile::kMathThreads>();
}

/// A warpgroup's products: 64 experts x 128 columns.
template <typename Tile>
struct GateSums {
  float sums[Tile::kGroupColumns / 2] = {};    // of the current block of tokens
  float totals[Tile::kGroupColumns / 2] = {};  // of the blocks before it

  __device__ __forceinline__ void multiply(SharedAddress parts, SharedAddress x) {
    using Operand = ops::hopper::WgmmaOperand<true>;
    ops::hopper::begin_products();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t b =
          Operand::descriptor(x + half * (Tile::kXBlockBytes / 2), Tile::kXBlockBytes);
#pragma unroll
      for (int part = 0; part < kNumParts; ++part) {
        const uint64_t a =
            Operand::descriptor(parts + half * Tile::kHalfBytes + part * Tile::kPartBytes);
        ops::hopper::Wgmma<BF16, Tile::kGroupColumns>::template multiply<true, true>(sums, a, b,
                                                                                     true);
      }
    }
    ops::hopper::commit_products();
  }

  // REQUIRES: no product is pending.
  __device__ __forceinline__ void end_block(bool is_first) {
    ops::hopper::settle(sums);
#pragma unroll
    for (int n = 0; n < Tile::kGroupColumns / 2; ++n) {
      totals[n] = is_first ? sums[n] : totals[n] + sums[n];
      sums[n] = 0.0f;
    }
  }
};

/// Sums the products of a slice, in ascending order and blocks of kGemmBlockK.
template <typename Tile>
__device__ void multiply_slots(const GradGateArgs& args, const GatePart& part, GateSums<Tile>& own,
                               SlotBarriers& barriers, std::byte* slots) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const auto is_padding = [&](int token) { return token < part.end && args.sequences[token] < 0; };
  SlotPlace ring{Tile::kSlots};
  bool is_next_padding = is_padding(part.begin + lane);
  for (int first = part.begin; first < part.end; first += ops::kGemmBlockK) {
    const int end = min(first + static_cast<int>(ops::kGemmBlockK), part.end);
    int previous = -1;
    for (int token = first; token < end; token += kTokens) {
      const uint32_t padding = __ballot_sync(~0u, is_next_padding);
      is_next_padding = is_padding(token + kTokens + lane);
      std::byte* const slot = slots + ring.slot * Tile::kSlotBytes;
      const SharedAddress address = ops::hopper::shared_address(slot);
      ops::hopper::wait(barriers.full[ring.slot], ring.parity);
      if (padding != 0) zero_padding<Tile>(padding, slot);
      own.multiply(
          address + group % Tile::kExpertGroups * Tile::kGroupBytes,
          address + Tile::kPartsBytes + group / Tile::kExpertGroups * 2 * Tile::kXBlockBytes);
      if (previous >= 0) {
        ops::hopper::wait_for_products<1>();
        barriers.release_in_both(previous);
      }
      previous = ring.slot;
      ring.advance();
    }
    ops::hopper::wait_for_products<0>();
    own.end_block(first == part.begin);
    barriers.release_in_both(previous);
  }
}

template <typename Tile>
__device__ void store_sums(const GradGateArgs& args, const GatePart& part,
                           const GateSums<Tile>& own) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = warp / 4;
  const int first_column = part.column + group / Tile::kExpertGroups * Tile::kGroupColumns;
  const bool is_slice = args.slices.count > 1;
  float* const out = is_slice ? args.slice_sums + blockIdx.y * args.E * args.D : args.grad_gate;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t expert =
        part.expert + group % Tile::kExpertGroups * kBlock + warp % 4 * 16 + half * 8 + lane / 4;
    if (expert >= args.E) break;
#pragma unroll
    for (int j = 0; j < Tile::kGroupColumns / 8; ++j) {
      const int64_t column = first_column + j * 8 + lane % 4 * 2;
      if (column >= args.D) break;
      float* const to = out + expert * args.D + column;
      const float first = own.totals[4 * j + 2 * half];
      const float second = own.totals[4 * j + 2 * half + 1];
      if (is_slice) {
        *reinterpret_cast<float2*>(to) = make_float2(first, second);
      } else {  // perhaps not aligned
        to[0] = args.accumulates ? to[0] + first : first;
        to[1] = args.accumulates ? to[1] + second : second;
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// A block computes one tile of one slice; one warp loads and the others multiply.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    grad_gate_kernel(const __grid_constant__ GateMaps maps,
                     const __grid_constant__ GradGateArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte grad_gate_memory[];
  __shared__ SlotBarriers barriers;
  std::byte* const slots = first_slot(grad_gate_memory);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) barriers.init(Tile::kSlots, Tile::kMathThreads / 32 * kClusterSize);
  __syncthreads();
  ops::hopper::sync_cluster();
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const GatePart part = GatePart::of<Tile>(args);
  if (thread >= Tile::kMathThreads) {
    if (thread == Tile::kMathThreads) {
      load_slots<Tile>(maps, part, barriers, ops::hopper::shared_address(slots));
    }
    __syncwarp();
  } else {
    GateSums<Tile> own;
    multiply_slots<Tile>(args, part, own, barriers, slots);
    store_sums<Tile>(args, part, own);
  }
  ops::hopper::sync_cluster();  // the other block may still arrive at the barriers of this one
#endif
}

template <typename Tile>
bool load_kernel() {
  const auto kernel = grad_gate_kernel<Tile>;
  cuda::load_kernels(kernel);
  cudaFuncAttributes attributes{};
  CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.sharedSizeBytes == 0) return false;  // has no body
  CROSSDOCK_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  return true;
}

template <typename Tile>
void launch(const GradGateArgs& args, ops::hopper::TensorMaps& maps, cudaStream_t stream) {
  const auto E = static_cast<uint64_t>(args.E);
  const auto T = static_cast<uint64_t>(args.T);
  const auto D = static_cast<uint64_t>(args.D);
  const uint64_t part_row_bytes = static_cast<uint64_t>(args.parts.pitch) * 2;
  const GateMaps both{.parts = maps.get({.data = args.parts.values,
                                         .dtype = DType::kBF16,
                                         .rank = 3,
                                         .sizes = {E, T, kNumParts},
                                         .strides = {part_row_bytes, part_row_bytes * T},
                                         .box = {kBlock, kTokens / 2, kNumParts}}),
                      .x = maps.get({.data = args.x,
                                     .dtype = DType::kBF16,
                                     .rank = 2,
                                     .sizes = {D, T},
                                     .strides = {D * 2},
                                     .box = {kBlock, kTokens}})};
  const int64_t column_tiles =
      round_up((args.D + Tile::kColumns - 1) / Tile::kColumns, int64_t{kClusterSize});
  const int64_t expert_tiles = (args.E + Tile::kExperts - 1) / Tile::kExperts;
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kClusterSize, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(column_tiles * expert_tiles),
                        static_cast<unsigned>(args.slices.count));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = Tile::kSlots * Tile::kSlotBytes + kSlotAlignment;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = attributes.size();
  CROSSDOCK_CUDA(cudaLaunchKernelEx(&config, grad_gate_kernel<Tile>, both, args));
}

}  // namespace

bool load_grad_gate() {
  return load_kernel<GateTile<1>>() && load_kernel<GateTile<2>>();
}

void launch_grad_gate(const GradGateArgs& args, ops::hopper::TensorMaps& maps,
                      cudaStream_t stream) {
  if (args.E <= kBlock) {
    launch<GateTile<1>>(args, maps, stream);
  } else {
    launch<GateTile<2>>(args, maps, stream);
  }
}

}  // namespace crossdock::router::hopper
