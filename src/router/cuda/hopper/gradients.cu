#include <cstddef>

#include "core/cuda/launch.hpp"
#include "ops/cuda/element.cuh"
#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "ops/gemm.hpp"
#include "router/cuda/hopper/clusters.cuh"
#include "router/cuda/hopper/grad_tile.cuh"

// The role of gradients_kernel that loads and stores. For code that is compiled for sm_90a only.

namespace crossdock::router::hopper {

using ops::hopper::BoxTarget;

/// Fills the ring of parts, by one thread.
template <typename Tile>
__device__ void load_parts(const GradMaps& maps, const GradPart<Tile>& part,
                           SlotBarriers& barriers) {
  const int group = Tile::kShares ? ops::hopper::cluster_rank() : 0;
  SlotPlace ring{Tile::kPartsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    const SharedAddress to = part.parts(ring.slot) + group * kNumParts * kBlockBytes;
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], Tile::kPartsBytes);
    ops::hopper::load_box(&maps.parts, BoxTarget{to, full, Tile::kShares}, group * kBlock, token,
                          0);
    ring.advance();
  }
}

/// Fills the ring of x, or that of grad_x, by one thread. Without a map slots get no values.
template <typename Tile>
__device__ void load_rows(const CUtensorMap* map, const ColumnBoxes& boxes,
                          const GradPart<Tile>& part, SharedAddress slots, SlotBarriers& barriers) {
  SlotPlace ring{Tile::kRowsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    const SharedAddress to = slots + ring.slot * Tile::kRowsBytes;
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], map != nullptr ? Tile::kRowsBytes : 0);
    if (map != nullptr) boxes.load(map, BoxTarget{to, full, false}, part.column, token);
    ring.advance();
  }
}

template <typename Tile>
__device__ void load_gate(const GradMaps& maps, const ColumnBoxes& boxes,
                          const GradPart<Tile>& part, uint64_t& has_gate) {
  const SharedAddress barrier = ops::hopper::shared_address(&has_gate);
  ops::hopper::arrive_and_expect(has_gate, Tile::kGateBytes);
  for (int group = 0; group < Tile::kGroups; ++group) {
    const SharedAddress to = part.gate + group * Tile::kColumnBlocks * kBlockBytes;
    boxes.load(&maps.gate, BoxTarget{to, barrier, false}, part.column, group * kBlock);
  }
}

/// Stores the results in the ring of grad_x, by one thread.
template <typename Tile>
__device__ void store_rows(const GradMaps& maps, const ColumnBoxes& boxes,
                           const GradPart<Tile>& part, GradBarriers<Tile>& barriers) {
  SlotPlace ring{Tile::kRowsSlots};
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    ops::hopper::wait(barriers.is_computed[ring.slot], ring.parity);
    boxes.store(&maps.grad_x, part.grad_x(ring.slot), part.column, token);
    ops::hopper::commit_stores();
    ops::hopper::wait_until_stores_have_read();
    ops::hopper::arrive(barriers.grad_x.empty[ring.slot]);
    ring.advance();
  }
}

/// By one thread.
__device__ inline void prefetch_maps(const GradMaps& maps, const GradientsArgs& args) {
  ops::hopper::prefetch_map(&maps.parts);
  if (args.grad_gate != nullptr) ops::hopper::prefetch_map(&maps.x);
  if (!args.computes_x) return;
  ops::hopper::prefetch_map(&maps.gate);
  ops::hopper::prefetch_map(&maps.grad_x);
}

/// One warp of the fourth role.
template <typename Tile>
__device__ void copy_slots(const GradMaps& maps, const GradientsArgs& args,
                           const GradPart<Tile>& part, GradBarriers<Tile>& barriers) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  if (threadIdx.x % 32 != 0) return;
  if (warp == 0) {
    cuda::wait_for_previous_kernel();
    load_parts<Tile>(maps, part, barriers.parts);
  } else if (warp == 1 && args.grad_gate != nullptr) {
    load_rows<Tile>(&maps.x, args.boxes, part, part.x(0), barriers.x);
  } else if (warp == 2 && args.computes_x) {
    load_gate<Tile>(maps, args.boxes, part, barriers.has_gate);
    load_rows<Tile>(args.accumulates_x ? &maps.grad_x : nullptr, args.boxes, part, part.grad_x(0),
                    barriers.grad_x);
  } else if (warp == 3 && args.computes_x) {
    cuda::wait_for_previous_kernel();
    store_rows<Tile>(maps, args.boxes, part, barriers);
  }
}

// The role of gradients_kernel that computes grad_x. For code that is compiled for sm_90a only.

/// Starts the product of 64 tokens with the gate: experts ascending, for each the smallest parts
/// first.
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
}

/// A thread's values in a slot of grad_x, pairs of neighbours in the order of the sums. The copy
/// engine swizzles: piece p (16 bytes) of row r is at the place of piece p ^ (r % 8).
template <typename Tile>
class PairsInSlot {
 public:
  static constexpr int kCount = Tile::kColumns / 4;

  __device__ explicit PairsInSlot(SharedAddress slot) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    line_ = slot + (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
    row_ = lane / 4;
  }

  __device__ uint32_t read(int i) const {
    uint32_t pair;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(place(i)));
    return pair;
  }
  __device__ void write(int i, uint32_t pair) const {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(place(i)), "r"(pair) : "memory");
  }

 private:
  __device__ SharedAddress place(int i) const {
    return line_ + i / 16 * kBlockBytes + i % 2 * 8 * 128 + ((i / 2 % 8 ^ row_) << 4);
  }

  SharedAddress line_;
  int row_;
};

/// grad_x of all tokens of the slice, by a warpgroup.
template <typename Tile>
__device__ void compute_grad_x(const GradientsArgs& args, const GradPart<Tile>& part,
                               GradBarriers<Tile>& barriers) {
  using Pairs = PairsInSlot<Tile>;
  SlotPlace parts{Tile::kPartsSlots};
  SlotPlace rows{Tile::kRowsSlots};
  ops::hopper::wait(barriers.has_gate, 0);
  for (int token = part.token; token < part.end_token; token += Tile::kTokens) {
    float sums[Tile::kColumns / 2];
    uint32_t before[Pairs::kCount] = {};
    const Pairs pairs(part.grad_x(rows.slot));
    ops::hopper::wait(barriers.parts.full[parts.slot], parts.parity);
    multiply_gate<Tile>(sums, part.parts(parts.slot), part.gate);
    ops::hopper::wait(barriers.grad_x.full[rows.slot], rows.parity);
    if (args.accumulates_x) {
#pragma unroll
      for (int i = 0; i < Pairs::kCount; ++i) before[i] = pairs.read(i);
    }
    ops::hopper::wait_for_products<0>();
    ops::hopper::settle(sums);
    barriers.release_parts(parts.slot);
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      const float2 old = ops::unpack<BF16>(before[i]);
      const float first = args.accumulates_x ? old.x + sums[2 * i] : sums[2 * i];
      const float second = args.accumulates_x ? old.y + sums[2 * i + 1] : sums[2 * i + 1];
      pairs.write(i, ops::pack<BF16>(first, second));
    }
    publish_shared_memory();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ops::hopper::arrive(barriers.is_computed[rows.slot]);
    parts.advance();
    rows.advance();
  }
}

// The role of gradients_kernel that computes grad_gate. For code that is compiled for sm_90a only.

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
        barriers.release_parts(previous_parts);
      }
      previous_parts = parts.slot;
      previous_x = x.slot;
      parts.advance();
      x.advance();
    }
    ops::hopper::wait_for_products<0>();
    own.end_block(first == part.token);
    barriers.x.release(previous_x);
    barriers.release_parts(previous_parts);
  }
  own.store(args, part.column, group * kBlock);
}

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
