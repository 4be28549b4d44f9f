#include <array>
#include <cstddef>

#include "core/cuda/check.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/load_kernels.hpp"
#include "core/sizes.hpp"
#include "ops/cuda/element.cuh"
#include "ops/cuda/hopper/tma.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "ops/gemm.hpp"
#include "router/cuda/hopper/gradients.hpp"
#include "router/cuda/hopper/slot_ring.cuh"

// A block has 128 columns and a slice of the tokens. It keeps its columns of the gate in shared
// memory and its sums of grad_gate in registers. Tokens pass by, 64 at a time, through three rings
// of slots: the parts of grad_logits, x, and grad_x. The warpgroups of a block:
//
//   one for each 64 experts   multiply parts^T x, and sum over the tokens of the slice
//   one                       multiplies parts by the gate, and puts results in the place of grad_x
//   one                       a warp for each ring fills it, a warp stores grad_x
//
// The columns of the two blocks of a cluster are neighbours: each block loads half of the parts for
// both.

namespace crossdock::router::hopper {
namespace {

using ops::hopper::BoxTarget;
using ops::hopper::kBlock;
using ops::hopper::kBlockBytes;
using ops::hopper::SharedAddress;

/// expert_groups * 64 experts, of which the product with the gate takes num_steps * 16.
template <int expert_groups, int num_steps>
struct GradTile {
  static constexpr int kGroups = expert_groups;
  static constexpr int kSteps = num_steps;
  static constexpr int kTokens = kBlock;   // at a time
  static constexpr int kColumnBlocks = 2;  // of 64 columns
  static constexpr int kColumns = kColumnBlocks * kBlock;
  static constexpr int kSumThreads = kGroups * 128;  // of the warpgroups for grad_gate
  static constexpr int kThreads = kSumThreads + 2 * 128;
  // Registers of a thread: for grad_gate, for grad_x, of those that load and store.
  static constexpr int kSumRegisters = kGroups == 2 ? 168 : 208;
  static constexpr int kXRegisters = kGroups == 2 ? 136 : 208;
  static constexpr int kCopyRegisters = 40;
  // Shared memory: the gate by group and column block, then the rings.
  static constexpr int kGateBytes = kGroups * kColumnBlocks * kBlockBytes;
  static constexpr int kPartsBytes = kGroups * kNumParts * kBlockBytes;  // by group and part
  static constexpr int kRowsBytes = kColumnBlocks * kBlockBytes;  // of x or grad_x, by column block
  static constexpr int kPartsSlots = kGroups == 2 ? 2 : 3;
  static constexpr int kRowsSlots = kGroups == 2 ? 3 : 4;
  static constexpr int kSharedBytes =
      kSlotAlignment + kGateBytes + kPartsSlots * kPartsBytes + 2 * kRowsSlots * kRowsBytes;
  static_assert(kSharedBytes <= kGradSharedBytes);
};

struct GradientsArgs {
  const int32_t* sequences;  // [T]; negative: padding
  int64_t T;
  int64_t E;
  int64_t D;
  TokenSlices slices;
  bool computes_x;
  bool accumulates_x;
  float* grad_gate;  // out: [slices.count, E, D], a sum for each slice; null: not needed
  bool accumulates_gate;
};

struct GradMaps {
  CUtensorMap parts;   // boxes of 64 experts x 32 tokens x 1 part
  CUtensorMap gate;    // boxes of 64 columns x 64 experts
  CUtensorMap x;       // boxes of 64 columns x 64 tokens
  CUtensorMap grad_x;  // likewise
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename Tile>
struct GradBarriers {
  uint64_t has_gate;
  SlotBarriers parts;
  SlotBarriers x;
  SlotBarriers grad_x;
  uint64_t is_computed[Tile::kRowsSlots];  // results are in the slot of grad_x

  __device__ void init(const GradientsArgs& args) {
    const int sum_warps = args.grad_gate != nullptr ? Tile::kSumThreads / 32 : 0;
    const int x_warps = args.computes_x ? 4 : 0;
    ops::hopper::init_barrier(has_gate, 1);
    for (uint64_t& barrier : is_computed) ops::hopper::init_barrier(barrier, 4);
    parts.init(Tile::kPartsSlots, kClusterSize * (sum_warps + x_warps));
    x.init(Tile::kRowsSlots, Tile::kSumThreads / 32);
    grad_x.init(Tile::kRowsSlots, 1);
  }
};

/// A block's part of the gradients, and its shared memory.
template <typename Tile>
struct GradPart {
  int column;     // the first one
  int token;      // likewise
  int end_token;  // of the slice
  SharedAddress gate;

  __device__ GradPart(const GradientsArgs& args, std::byte* memory)
      : column(static_cast<int>(blockIdx.x) * Tile::kColumns),
        token(static_cast<int>(blockIdx.y * args.slices.num_tokens)),
        end_token(static_cast<int>(min(token + args.slices.num_tokens, args.T))),
        gate(ops::hopper::shared_address(memory)) {}

  __device__ SharedAddress parts(int slot) const {
    return gate + Tile::kGateBytes + slot * Tile::kPartsBytes;
  }
  __device__ SharedAddress x(int slot) const {
    return parts(Tile::kPartsSlots) + slot * Tile::kRowsBytes;
  }
  __device__ SharedAddress grad_x(int slot) const { return x(Tile::kRowsSlots + slot); }
};

/// Fills the ring of parts together with the other block, by one thread.
template <typename Tile>
__device__ void load_parts(const GradMaps& maps, const GradPart<Tile>& part,
                           SlotBarriers& barriers) {
  constexpr int kHalf = Tile::kTokens / kClusterSize;
  const int rank = ops::hopper::cluster_rank();
  SlotPlace ring{Tile::kPartsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], Tile::kPartsBytes);
#pragma unroll
    for (int i = 0; i < Tile::kGroups * kNumParts; ++i) {
      const SharedAddress to = part.parts(ring.slot) + i * kBlockBytes + rank * kHalf * 128;
      ops::hopper::load_box(&maps.parts, BoxTarget{to, full, true}, i / kNumParts * kBlock,
                            token + rank * kHalf, i % kNumParts);
    }
    ring.advance();
  }
}

/// Fills the ring of x, or that of grad_x, by one thread. Without `reads` slots get no values.
template <typename Tile>
__device__ void load_rows(const CUtensorMap* map, const GradPart<Tile>& part, SharedAddress slots,
                          SlotBarriers& barriers, bool reads) {
  SlotPlace ring{Tile::kRowsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], reads ? Tile::kRowsBytes : 0);
#pragma unroll
    for (int block = 0; reads && block < Tile::kColumnBlocks; ++block) {
      const SharedAddress to = slots + ring.slot * Tile::kRowsBytes + block * kBlockBytes;
      ops::hopper::load_box(map, BoxTarget{to, full, false}, part.column + block * kBlock, token);
    }
    ring.advance();
  }
}

template <typename Tile>
__device__ void load_gate(const GradMaps& maps, const GradPart<Tile>& part, uint64_t& has_gate) {
  const SharedAddress barrier = ops::hopper::shared_address(&has_gate);
  ops::hopper::arrive_and_expect(has_gate, Tile::kGateBytes);
#pragma unroll
  for (int i = 0; i < Tile::kGroups * Tile::kColumnBlocks; ++i) {
    ops::hopper::load_box(&maps.gate, BoxTarget{part.gate + i * kBlockBytes, barrier, false},
                          part.column + i % Tile::kColumnBlocks * kBlock,
                          i / Tile::kColumnBlocks * kBlock);
  }
}

/// Stores the results in the ring of grad_x, by one thread.
template <typename Tile>
__device__ void store_rows(const GradMaps& maps, const GradPart<Tile>& part,
                           GradBarriers<Tile>& barriers) {
  SlotPlace ring{Tile::kRowsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    ops::hopper::wait(barriers.is_computed[ring.slot], ring.parity);
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      ops::hopper::store_box(&maps.grad_x, part.grad_x(ring.slot) + block * kBlockBytes,
                             part.column + block * kBlock, token);
    }
    ops::hopper::commit_stores();
    ops::hopper::wait_until_stores_have_read();
    ops::hopper::arrive(barriers.grad_x.empty[ring.slot]);
    ring.advance();
  }
}

/// One warp of the fourth role.
template <typename Tile>
__device__ void copy_slots(const GradMaps& maps, const GradientsArgs& args,
                           const GradPart<Tile>& part, GradBarriers<Tile>& barriers) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  if (threadIdx.x % 32 != 0) return;
  if (warp == 0) {
    load_parts<Tile>(maps, part, barriers.parts);
  } else if (warp == 1 && args.grad_gate != nullptr) {
    load_rows<Tile>(&maps.x, part, part.x(0), barriers.x, true);
  } else if (warp == 2 && args.computes_x) {
    load_gate<Tile>(maps, part, barriers.has_gate);
    load_rows<Tile>(&maps.grad_x, part, part.grad_x(0), barriers.grad_x, args.accumulates_x);
  } else if (warp == 3 && args.computes_x) {
    store_rows<Tile>(maps, part, barriers);
  }
}

/// Tokens of a step that are padding, a bit for each.
class Padding {
 public:
  __device__ Padding(const int32_t* sequences, int token, int end_token)
      : sequences_(sequences), token_(token + static_cast<int>(threadIdx.x) % 32), end_(end_token) {
    read();
  }

  /// Those of the next step, by a whole warp.
  __device__ uint64_t next() {
    const uint64_t high = __ballot_sync(~0u, is_padding_[1]);
    const uint64_t bits = high << 32 | __ballot_sync(~0u, is_padding_[0]);
    token_ += kBlock;
    read();
    return bits;
  }

 private:
  __device__ void read() {  // in advance
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = token_ + half * 32;
      is_padding_[half] = token < end_ && sequences_[token] < 0;
    }
  }

  const int32_t* sequences_;
  int token_;
  int end_;
  bool is_padding_[2];
};

/// Zeroes the rows of x in a slot that are padding. By all threads that sum grad_gate.
template <typename Tile>
__device__ void zero_padding(uint64_t padding, SharedAddress x) {
  constexpr int kPieces = 128 / 16;
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kColumnBlocks * kBlock * kPieces;
       i += Tile::kSumThreads) {
    if ((padding >> (i / kPieces % kBlock) & 1) == 0) continue;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(x + i * 16), "r"(0) : "memory");
  }
  publish_shared_memory();
  sync_math<Tile::kSumThreads>();
}

/// A warpgroup's sums of grad_gate: 64 experts x 128 columns.
template <typename Tile>
struct GateSums {
  float sums[Tile::kColumns / 2] = {};    // of the current block of tokens
  float totals[Tile::kColumns / 2] = {};  // of the blocks before it

  /// Tokens ascending, for each the smallest parts first.
  __device__ __forceinline__ void multiply(SharedAddress parts, SharedAddress x) {
    using Operand = ops::hopper::WgmmaOperand<true>;
    ops::hopper::begin_products();
#pragma unroll
    for (int step = 0; step < Tile::kTokens / 16; ++step) {
      const uint64_t b = Operand::descriptor(x) + step * Operand::kPart;
#pragma unroll
      for (int part = 0; part < kNumParts; ++part) {
        const uint64_t a = Operand::descriptor(parts + part * kBlockBytes) + step * Operand::kPart;
        ops::hopper::Wgmma<BF16, Tile::kColumns>::template multiply<true, true>(sums, a, b, true);
      }
    }
    ops::hopper::commit_products();
  }

  // REQUIRES: no product is pending.
  __device__ __forceinline__ void end_block(bool is_first) {
    ops::hopper::settle(sums);
#pragma unroll
    for (int n = 0; n < Tile::kColumns / 2; ++n) {
      totals[n] = is_first ? sums[n] : totals[n] + sums[n];
      sums[n] = 0.0f;
    }
  }

  __device__ void store(const GradientsArgs& args, int first_column, int first_expert) const {
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float* const out = args.grad_gate + blockIdx.y * args.E * args.D;
    const bool is_aligned = reinterpret_cast<uintptr_t>(out) % sizeof(float2) == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t expert = first_expert + warp * 16 + half * 8 + lane / 4;
      if (expert >= args.E) break;
#pragma unroll
      for (int j = 0; j < Tile::kColumns / 8; ++j) {
        const int64_t column = first_column + j * 8 + lane % 4 * 2;
        if (column >= args.D) break;
        float* const to = out + expert * args.D + column;
        const float first = totals[4 * j + 2 * half];
        const float second = totals[4 * j + 2 * half + 1];
        if (is_aligned && !args.accumulates_gate) {
          *reinterpret_cast<float2*>(to) = make_float2(first, second);
        } else {
          to[0] = args.accumulates_gate ? to[0] + first : first;
          to[1] = args.accumulates_gate ? to[1] + second : second;
        }
      }
    }
  }
};

/// grad_gate of 64 experts, by a warpgroup: blocks of kGemmBlockK tokens in ascending order.
template <typename Tile>
__device__ void sum_grad_gate(const GradientsArgs& args, const GradPart<Tile>& part,
                              GradBarriers<Tile>& barriers) {
  const int group = static_cast<int>(threadIdx.x) / 128;
  GateSums<Tile> own;
  Padding padding(args.sequences, part.token, part.end_token);
  SlotPlace parts{Tile::kPartsSlots};
  SlotPlace x{Tile::kRowsSlots};
  for (int first = part.token; first < part.end_token; first += ops::kGemmBlockK) {
    const int end = min(first + static_cast<int>(ops::kGemmBlockK), part.end_token);
    int previous_parts = -1;
    int previous_x = -1;
    for (int token = first; token < end; token += Tile::kTokens) {
      const uint64_t bits = padding.next();
      ops::hopper::wait(barriers.x.full[x.slot], x.parity);
      if (bits != 0) zero_padding<Tile>(bits, part.x(x.slot));
      ops::hopper::wait(barriers.parts.full[parts.slot], parts.parity);
      own.multiply(part.parts(parts.slot) + group * kNumParts * kBlockBytes, part.x(x.slot));
      if (token > first) {
        ops::hopper::wait_for_products<1>();
        barriers.x.release(previous_x);
        barriers.parts.release_in_both(previous_parts);
      }
      previous_parts = parts.slot;
      previous_x = x.slot;
      parts.advance();
      x.advance();
    }
    ops::hopper::wait_for_products<0>();
    own.end_block(first == part.token);
    barriers.x.release(previous_x);
    barriers.parts.release_in_both(previous_parts);
  }
  own.store(args, part.column, group * kBlock);
}

/// The product of 64 tokens with the gate: experts ascending, for each the smallest parts first.
template <typename Tile>
__device__ __forceinline__ void multiply_gate(float (&sums)[Tile::kColumns / 2],
                                              SharedAddress parts, SharedAddress gate) {
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

/// grad_x of all tokens of the slice, by a warpgroup.
template <typename Tile>
__device__ void compute_grad_x(const GradientsArgs& args, const GradPart<Tile>& part,
                               GradBarriers<Tile>& barriers) {
  SlotPlace parts{Tile::kPartsSlots};
  SlotPlace rows{Tile::kRowsSlots};
  ops::hopper::wait(barriers.has_gate, 0);
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    float sums[Tile::kColumns / 2];
    ops::hopper::wait(barriers.parts.full[parts.slot], parts.parity);
    multiply_gate<Tile>(sums, part.parts(parts.slot), part.gate);
    barriers.parts.release_in_both(parts.slot);
    ops::hopper::wait(barriers.grad_x.full[rows.slot], rows.parity);
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      const SharedAddress to = part.grad_x(rows.slot) + block * kBlockBytes;
      if (args.accumulates_x) {
        put<true>(sums + block * (kBlock / 2), to);
      } else {
        put<false>(sums + block * (kBlock / 2), to);
      }
    }
    publish_shared_memory();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ops::hopper::arrive(barriers.is_computed[rows.slot]);
    parts.advance();
    rows.advance();
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

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
  __syncthreads();
  ops::hopper::sync_cluster();
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  if (warpgroup < Tile::kGroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kSumRegisters));
    if (args.grad_gate != nullptr) sum_grad_gate<Tile>(args, part, barriers);
  } else if (warpgroup == Tile::kGroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kXRegisters));
    if (args.computes_x) compute_grad_x<Tile>(args, part, barriers);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kCopyRegisters));
    copy_slots<Tile>(maps, args, part, barriers);
    __syncwarp();
  }
  ops::hopper::sync_cluster();  // the other block may still arrive at the barriers of this one
#endif
}

template <typename Tile>
bool load_kernel() {
  const auto kernel = gradients_kernel<Tile>;
  cuda::load_kernels(kernel);
  cudaFuncAttributes attributes{};
  CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.sharedSizeBytes == 0) return false;  // has no body
  CROSSDOCK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      Tile::kSharedBytes));
  return true;
}

struct GradOperands {
  GradParts parts;
  GradXArgs of_x;
  GradGateArgs of_gate;
};

template <typename Tile>
GradMaps maps_of(const GradOperands& operands, ops::hopper::TensorMaps& maps) {
  const auto& [parts, of_x, of_gate] = operands;
  const auto T = static_cast<uint64_t>(of_x.T);
  const auto E = static_cast<uint64_t>(of_x.E);
  const auto D = static_cast<uint64_t>(of_x.D);
  const uint64_t part_row_bytes = static_cast<uint64_t>(parts.pitch) * 2;
  const auto blocks_of = [&](const void* data, uint64_t num_rows) {
    if (data == nullptr) return CUtensorMap{};  // is not used
    return maps.get({.data = data,
                     .dtype = DType::kBF16,
                     .rank = 2,
                     .sizes = {D, num_rows},
                     .strides = {D * 2},
                     .box = {kBlock, kBlock}});
  };
  return {.parts = maps.get({.data = parts.values,
                             .dtype = DType::kBF16,
                             .rank = 3,
                             .sizes = {E, T, kNumParts},
                             .strides = {part_row_bytes, part_row_bytes * T},
                             .box = {kBlock, Tile::kTokens / kClusterSize, 1}}),
          .gate = blocks_of(of_x.gate, E),
          .x = blocks_of(of_gate.x, T),
          .grad_x = blocks_of(of_x.grad_x, T)};
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
      .computes_x = of_x.grad_x != nullptr,
      .accumulates_x = of_x.accumulates,
      .grad_gate = has_gate && !is_one ? of_gate.slice_sums : of_gate.grad_gate,
      .accumulates_gate = is_one && of_gate.accumulates};
  const int64_t column_tiles =
      round_up((args.D + Tile::kColumns - 1) / Tile::kColumns, int64_t{kClusterSize});
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kClusterSize, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(column_tiles), static_cast<unsigned>(slices.count));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = attributes.size();
  CROSSDOCK_CUDA(
      cudaLaunchKernelEx(&config, gradients_kernel<Tile>, maps_of<Tile>(operands, maps), args));
}

}  // namespace

bool load_gradients() {
  return load_kernel<GradTile<1, 2>>() && load_kernel<GradTile<1, 4>>() &&
         load_kernel<GradTile<2, 8>>();
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
