#include <algorithm>
#include <cstddef>

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/load_kernels.hpp"
#include "ops/cuda/element.cuh"
#include "ops/cuda/hopper/tma.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "router/cuda/hopper/grad_x.hpp"
#include "router/cuda/hopper/slot_ring.cuh"

// grad_x (+)= grad_logits gate, where grad_logits is the sum of three parts in bf16. A block has
// 128 tokens and some of the columns, 128 at a time. It keeps the parts of its tokens in shared
// memory. One thread loads tiles of the gate and of grad_x into a ring of slots, two warpgroups
// multiply for 64 tokens each and put the results in the place of grad_x, and a thread for each
// stores them.

namespace crossdock::router::hopper {
namespace {

using ops::hopper::BoxTarget;
using ops::hopper::kBlock;
using ops::hopper::kBlockBytes;
using ops::hopper::SharedAddress;

/// 128 tokens x 128 columns; num_steps * 16 experts.
template <int num_steps>
struct GradXTile {
  static constexpr int kSteps = num_steps;
  static constexpr int kInnerBlocks = (kSteps + 3) / 4;  // of 64 experts
  static constexpr int kGroups = 2;                      // warpgroups, 64 tokens each
  static constexpr int kTokens = kGroups * kBlock;
  static constexpr int kColumnBlocks = 2;  // of 64 columns
  static constexpr int kColumns = kColumnBlocks * kBlock;
  static constexpr int kMathThreads = kGroups * 128;
  static constexpr int kThreads = kMathThreads + 32 + kGroups * 32;
  // By group and inner block.
  static constexpr int kPartsBytes = kGroups * kInnerBlocks * kNumParts * kBlockBytes;
  // Of a slot: the gate by inner and column block, grad_x by column block and group.
  static constexpr int kGateBytes = kInnerBlocks * kColumnBlocks * kBlockBytes;
  static constexpr int kGradXBytes = kColumnBlocks * kGroups * kBlockBytes;
  static constexpr int kSlotBytes = kGateBytes + kGradXBytes;
  static constexpr int kSlots = kInnerBlocks == 1 ? 3 : 2;
  static constexpr int kSharedBytes = kSlotAlignment + kPartsBytes + kSlots * kSlotBytes;
  static_assert(kSharedBytes <= kGradSharedBytes);
};

struct GradXMaps {
  CUtensorMap parts;   // boxes of 64 experts x 64 tokens x 3 parts
  CUtensorMap gate;    // boxes of 64 columns x 64 experts
  CUtensorMap grad_x;  // boxes of 64 columns x 64 tokens
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename Tile>
struct GradXBarriers {
  SlotBarriers slots;
  uint64_t has_parts;
  uint64_t is_computed[Tile::kGroups][Tile::kSlots];  // results are in the slot

  __device__ void init() {
    ops::hopper::init_barrier(has_parts, 1);
    for (int group = 0; group < Tile::kGroups; ++group) {
      for (int slot = 0; slot < Tile::kSlots; ++slot) {
        ops::hopper::init_barrier(is_computed[group][slot], 4);  // warps of the group
      }
    }
    slots.init(Tile::kSlots, Tile::kGroups);
  }
};

/// A block's part of grad_x, and its shared memory.
template <typename Tile>
struct GradXPart {
  int token;   // the first one
  int column;  // likewise
  int end_column;
  bool accumulates;
  SharedAddress parts;
  SharedAddress slots;

  __device__ GradXPart(const GradXArgs& args, std::byte* memory)
      : token(static_cast<int>(blockIdx.x) * Tile::kTokens),
        accumulates(args.accumulates),
        parts(ops::hopper::shared_address(memory)),
        slots(parts + Tile::kPartsBytes) {
    const auto D = static_cast<int>(args.D);
    const int tiles = (D + Tile::kColumns - 1) / Tile::kColumns;
    const auto num_splits = static_cast<int>(gridDim.y);
    const int columns = (tiles + num_splits - 1) / num_splits * Tile::kColumns;
    column = static_cast<int>(blockIdx.y) * columns;
    end_column = min(column + columns, D);
  }

  __device__ SharedAddress gate(int slot) const { return slots + slot * Tile::kSlotBytes; }
  __device__ SharedAddress grad_x(int slot, int column_block, int group) const {
    return gate(slot) + Tile::kGateBytes + (column_block * Tile::kGroups + group) * kBlockBytes;
  }
};

/// The loader, by one thread.
template <typename Tile>
__device__ void load_slots(const GradXMaps& maps, const GradXPart<Tile>& part,
                           GradXBarriers<Tile>& barriers) {
  ops::hopper::arrive_and_expect(barriers.has_parts, Tile::kPartsBytes);
  const SharedAddress has_parts = ops::hopper::shared_address(&barriers.has_parts);
#pragma unroll
  for (int i = 0; i < Tile::kGroups * Tile::kInnerBlocks; ++i) {
    const BoxTarget to{part.parts + i * kNumParts * kBlockBytes, has_parts, false};
    ops::hopper::load_box(&maps.parts, to, i % Tile::kInnerBlocks * kBlock,
                          part.token + i / Tile::kInnerBlocks * kBlock, 0);
  }
  SlotPlace ring{Tile::kSlots};
  for (int column = part.column; column < part.end_column; column += Tile::kColumns) {
    uint64_t& is_full = barriers.slots.full[ring.slot];
    const SharedAddress full = ops::hopper::shared_address(&is_full);
    ops::hopper::wait(barriers.slots.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(is_full, part.accumulates ? Tile::kSlotBytes : Tile::kGateBytes);
#pragma unroll
    for (int i = 0; i < Tile::kInnerBlocks * Tile::kColumnBlocks; ++i) {
      const BoxTarget to{part.gate(ring.slot) + i * kBlockBytes, full, false};
      ops::hopper::load_box(&maps.gate, to, column + i % Tile::kColumnBlocks * kBlock,
                            i / Tile::kColumnBlocks * kBlock);
    }
#pragma unroll
    for (int i = 0; part.accumulates && i < Tile::kColumnBlocks * Tile::kGroups; ++i) {
      const int block = i / Tile::kGroups;
      const int group = i % Tile::kGroups;
      const BoxTarget to{part.grad_x(ring.slot, block, group), full, false};
      ops::hopper::load_box(&maps.grad_x, to, column + block * kBlock, part.token + group * kBlock);
    }
    ring.advance();
  }
}

/// Stores the results of a group, by one thread.
template <typename Tile>
__device__ void store_slots(const GradXMaps& maps, const GradXPart<Tile>& part,
                            GradXBarriers<Tile>& barriers, int group) {
  SlotPlace ring{Tile::kSlots};
  for (int column = part.column; column < part.end_column; column += Tile::kColumns) {
    ops::hopper::wait(barriers.is_computed[group][ring.slot], ring.parity);
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      ops::hopper::store_box(&maps.grad_x, part.grad_x(ring.slot, block, group),
                             column + block * kBlock, part.token + group * kBlock);
    }
    ops::hopper::commit_stores();
    ops::hopper::wait_until_stores_have_read();
    ops::hopper::arrive(barriers.slots.empty[ring.slot]);
    ring.advance();
  }
}

/// The products of a group for one tile: k ascending, for each k the smallest parts first.
template <typename Tile>
__device__ __forceinline__ void multiply(float (&sums)[Tile::kColumns / 2], SharedAddress parts,
                                         SharedAddress gate) {
  using A = ops::hopper::WgmmaOperand<false>;
  using B = ops::hopper::WgmmaOperand<true>;
  ops::hopper::begin_products();
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    const uint64_t b =
        B::descriptor(gate + step / 4 * Tile::kColumnBlocks * kBlockBytes) + step % 4 * B::kPart;
#pragma unroll
    for (int part = 0; part < kNumParts; ++part) {
      const uint64_t a =
          A::descriptor(parts + (step / 4 * kNumParts + part) * kBlockBytes) + step % 4 * A::kPart;
      ops::hopper::Wgmma<BF16, Tile::kColumns>::template multiply<false, true>(
          sums, a, b, step > 0 || part > 0);
    }
  }
  ops::hopper::commit_products();
  ops::hopper::wait_for_products<0>();
  ops::hopper::settle(sums);
}

/// Puts results in the place of 64 columns of grad_x, or adds them to what is there. The copy
/// engine swizzles: piece p (16 bytes) of row r is at the place of piece p ^ (r % 8).
template <bool kAccumulates>
__device__ __forceinline__ void put(const float* sums, SharedAddress block) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const SharedAddress line = block + (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
  const auto place = [&](int j, int half) { return line + half * 8 * 128 + ((j ^ lane / 4) << 4); };
  uint32_t before[8][2];  // read in advance
  if constexpr (kAccumulates) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(before[j][half]) : "r"(place(j, half)));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 sum = make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
      if constexpr (kAccumulates) {
        const float2 old = ops::unpack<BF16>(before[j][half]);
        sum = make_float2(old.x + sum.x, old.y + sum.y);
      }
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(place(j, half)),
                   "r"(ops::pack<BF16>(sum.x, sum.y))
                   : "memory");
    }
  }
}

/// A math warp, together with the others of its group.
template <typename Tile>
__device__ void compute_slots(const GradXPart<Tile>& part, GradXBarriers<Tile>& barriers) {
  const int group = static_cast<int>(threadIdx.x) / 128;
  const SharedAddress parts = part.parts + group * Tile::kInnerBlocks * kNumParts * kBlockBytes;
  SlotPlace ring{Tile::kSlots};
  ops::hopper::wait(barriers.has_parts, 0);
  for (int column = part.column; column < part.end_column; column += Tile::kColumns) {
    float sums[Tile::kColumns / 2];
    ops::hopper::wait(barriers.slots.full[ring.slot], ring.parity);
    multiply<Tile>(sums, parts, part.gate(ring.slot));
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      const SharedAddress to = part.grad_x(ring.slot, block, group);
      if (part.accumulates) {
        put<true>(sums + block * (kBlock / 2), to);
      } else {
        put<false>(sums + block * (kBlock / 2), to);
      }
    }
    publish_shared_memory();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ops::hopper::arrive(barriers.is_computed[group][ring.slot]);
    ring.advance();
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// A block computes some columns of its tokens: two warpgroups multiply, one warp loads, and one for
// each group stores.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    grad_x_kernel(const __grid_constant__ GradXMaps maps, const __grid_constant__ GradXArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte grad_x_memory[];
  __shared__ GradXBarriers<Tile> barriers;
  const GradXPart<Tile> part(args, first_slot(grad_x_memory));
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  constexpr int kMathWarps = Tile::kMathThreads / 32;
  if (thread == 0) barriers.init();
  __syncthreads();
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  if (warp < kMathWarps) {
    compute_slots<Tile>(part, barriers);
  } else if (thread % 32 == 0) {
    if (warp == kMathWarps) {
      load_slots<Tile>(maps, part, barriers);
    } else {
      store_slots<Tile>(maps, part, barriers, warp - kMathWarps - 1);
    }
  }
#endif
}

template <typename Tile>
bool load_kernel() {
  const auto kernel = grad_x_kernel<Tile>;
  cuda::load_kernels(kernel);
  cudaFuncAttributes attributes{};
  CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.sharedSizeBytes == 0) return false;  // has no body
  CROSSDOCK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      Tile::kSharedBytes));
  return true;
}

template <typename Tile>
void launch(const GradXArgs& args, ops::hopper::TensorMaps& maps, cudaStream_t stream) {
  const auto E = static_cast<uint64_t>(args.E);
  const auto T = static_cast<uint64_t>(args.T);
  const auto D = static_cast<uint64_t>(args.D);
  const uint64_t part_row_bytes = static_cast<uint64_t>(args.parts.pitch) * 2;
  const auto blocks_of = [&](const void* data, uint64_t num_rows) {
    return maps.get({.data = data,
                     .dtype = DType::kBF16,
                     .rank = 2,
                     .sizes = {D, num_rows},
                     .strides = {D * 2},
                     .box = {kBlock, kBlock}});
  };
  const GradXMaps all{.parts = maps.get({.data = args.parts.values,
                                         .dtype = DType::kBF16,
                                         .rank = 3,
                                         .sizes = {E, T, kNumParts},
                                         .strides = {part_row_bytes, part_row_bytes * T},
                                         .box = {kBlock, kBlock, kNumParts}}),
                      .gate = blocks_of(args.gate, E),
                      .grad_x = blocks_of(args.grad_x, T)};
  const int64_t token_tiles = (args.T + Tile::kTokens - 1) / Tile::kTokens;
  const int64_t column_tiles = (args.D + Tile::kColumns - 1) / Tile::kColumns;
  const int64_t num_sms = cuda::num_sms(cuda::current_device());
  const int64_t splits = std::clamp<int64_t>(num_sms / token_tiles, 1, column_tiles);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(token_tiles), static_cast<unsigned>(splits));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  CROSSDOCK_CUDA(cudaLaunchKernelEx(&config, grad_x_kernel<Tile>, all, args));
}

}  // namespace

bool load_grad_x() {
  return load_kernel<GradXTile<2>>() && load_kernel<GradXTile<4>>() && load_kernel<GradXTile<8>>();
}

void launch_grad_x(const GradXArgs& args, ops::hopper::TensorMaps& maps, cudaStream_t stream) {
  if (args.E <= 32) {
    launch<GradXTile<2>>(args, maps, stream);
  } else if (args.E <= 64) {
    launch<GradXTile<4>>(args, maps, stream);
  } else {
    static_assert(kMostExpertsInParts == 128);
    launch<GradXTile<8>>(args, maps, stream);
  }
}

}  // namespace crossdock::router::hopper
