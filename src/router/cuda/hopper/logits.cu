#include <algorithm>
#include <cstddef>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/tensor_memory.hpp"
#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/wgmma.cuh"
#include "ops/gemm.hpp"
#include "router/cuda/hopper/clusters.cuh"
#include "router/cuda/hopper/gate_products.hpp"
#include "router/cuda/token_matrix.cuh"

// A block computes the logits of a tile of tokens for all experts, so that x is read once. One
// thread loads x and the gate step by step into a ring of slots; the warpgroups multiply gate x^T,
// some blocks of 64 experts each.

namespace crossdock::router::hopper {
namespace {

using ops::hopper::BoxTarget;
using ops::hopper::kBlock;
using ops::hopper::kBlockBytes;
using ops::hopper::kDepth;
using ops::hopper::SharedAddress;

constexpr int kLineBytes = 2 * kDepth;  // of a row in a slot
constexpr int kMostBoxRows = 256;
constexpr int64_t kMostExperts = 512;
constexpr int64_t kWantedSharedBytes = 200 << 10;  // leaves room for blocks of the next kernel

/// num_tokens tokens and groups * blocks_per_group * 64 experts. A slot has num_chunks chunks of
/// kDepth columns: whole stretches of memory for each token, which DRAM prefers.
template <int num_tokens, int groups, int blocks_per_group, int num_chunks>
struct LogitsTile {
  static constexpr int kTokens = num_tokens;
  static constexpr int kGroups = groups;            // warpgroups that multiply
  static constexpr int kBlocks = blocks_per_group;  // of 64 experts, for each of them
  static constexpr int kChunks = num_chunks;
  static constexpr int kExperts = kGroups * kBlocks * kBlock;
  static constexpr int kMathThreads = kGroups * 128;
  static constexpr int kThreads = kMathThreads + 32;
  static constexpr int kXBytes = kTokens * kLineBytes;      // of a chunk
  static_assert(kExperts <= kMostBoxRows || kChunks == 1);  // else a chunk would be in two boxes
  static_assert(ops::kGemmBlockK % (kChunks * kDepth) == 0);
};

/// Shared memory: slots, each with num_chunks times the rows of the gate, then of x. Products read
/// whole blocks of 64 experts: what follows the rows of the gate, and belongs to no expert.
struct LogitsLayout {
  int gate_rows;  // E, rounded up to whole groups of 8
  ColumnBoxes gate;
  ColumnBoxes x;
  int num_slots;
  int shared_bytes;

  template <typename Tile>
  static LogitsLayout of(int64_t E, int64_t D, int64_t most_bytes) {
    LogitsLayout layout{};
    const int num_boxes = E > kMostBoxRows ? 2 : 1;
    layout.gate_rows = static_cast<int>(round_up(E, 8 * num_boxes));
    layout.gate = ColumnBoxes::of(D, layout.gate_rows / num_boxes, Tile::kChunks);
    layout.x = ColumnBoxes::of(D, Tile::kTokens, Tile::kChunks);
    const int64_t slot_bytes = layout.slot_bytes<Tile>();
    const int64_t read_past = (Tile::kExperts - layout.gate_rows) * kLineBytes;
    const int64_t room = std::min(most_bytes, kWantedSharedBytes) - kSlotAlignment - read_past;
    layout.num_slots = static_cast<int>(std::min<int64_t>(room / slot_bytes, kMostSlots));
    layout.shared_bytes =
        static_cast<int>(kSlotAlignment + layout.num_slots * slot_bytes + read_past);
    return layout;
  }

  /// Whether enough slots fit.
  bool fits(int64_t most_bytes) const { return num_slots >= 2 && shared_bytes <= most_bytes; }

  template <typename Tile>
  __host__ __device__ int gate_bytes() const {
    return Tile::kChunks * gate_rows * kLineBytes;
  }
  template <typename Tile>
  __host__ __device__ int slot_bytes() const {
    return gate_bytes<Tile>() + Tile::kChunks * Tile::kXBytes;
  }
};

struct LogitsMaps {
  CUtensorMap gate;
  CUtensorMap x;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// The loader, by one thread.
template <typename Tile>
__device__ void load_slots(const LogitsMaps& maps, const LogitsLayout& layout,
                           SlotBarriers& barriers, SharedAddress slots, int num_steps) {
  const auto first_token = static_cast<int>(blockIdx.x) * Tile::kTokens;
  const int slot_bytes = layout.slot_bytes<Tile>();
  SlotPlace ring{layout.num_slots};
  for (int step = 0; step < num_steps; ++step) {
    ops::hopper::wait(barriers.empty[ring.slot], ring.parity ^ 1);
    ops::hopper::arrive_and_expect(barriers.full[ring.slot], slot_bytes);
    const SharedAddress slot = slots + ring.slot * slot_bytes;
    const SharedAddress full = ops::hopper::shared_address(&barriers.full[ring.slot]);
    const int column = step * Tile::kChunks * kDepth;
    layout.x.load(&maps.x, BoxTarget{slot + layout.gate_bytes<Tile>(), full, false}, column,
                  first_token);
    for (int row = 0; row < layout.gate_rows; row += layout.gate.num_rows) {
      layout.gate.load(&maps.gate, BoxTarget{slot + row * kLineBytes, full, false}, column, row);
    }
    ring.advance();
  }
}

/// A warpgroup's products: [64 experts, tokens] for each of its blocks.
template <typename Element, typename Tile>
struct LogitSums {
  float sums[Tile::kBlocks][Tile::kTokens / 2];    // of the current block of k
  float totals[Tile::kBlocks][Tile::kTokens / 2];  // of the blocks before it

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
      for (int n = 0; n < Tile::kTokens / 2; ++n) sums[i][n] = totals[i][n] = 0.0f;
    }
  }

  __device__ __forceinline__ void multiply(uint64_t gate, uint64_t x) {
    using Operand = ops::hopper::WgmmaOperand<false>;
#pragma unroll
    for (int part = 0; part < kDepth / 16; ++part) {
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) {
        ops::hopper::Wgmma<Element, Tile::kTokens>::template multiply<false, false>(
            sums[i], gate + i * (kBlockBytes / 16) + part * Operand::kPart,
            x + part * Operand::kPart, true);
      }
    }
  }

  // REQUIRES: no product is pending.
  __device__ __forceinline__ void end_block(bool is_first) {
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
      ops::hopper::settle(sums[i]);
#pragma unroll
      for (int n = 0; n < Tile::kTokens / 2; ++n) {
        totals[i][n] = is_first ? sums[i][n] : totals[i][n] + sums[i][n];
        sums[i][n] = 0.0f;
      }
    }
  }
};

/// Sums the products of all steps, in ascending order and blocks of kGemmBlockK.
template <typename Element, typename Tile>
__device__ void multiply_slots(LogitSums<Element, Tile>& own, const LogitsLayout& layout,
                               SlotBarriers& barriers, SharedAddress slots, int num_steps) {
  using Operand = ops::hopper::WgmmaOperand<false>;
  constexpr int kSteps = ops::kGemmBlockK / (Tile::kChunks * kDepth);
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int slot_bytes = layout.slot_bytes<Tile>();
  SlotPlace ring{layout.num_slots};
  own.clear();
  for (int first = 0; first < num_steps; first += kSteps) {
    const int end = min(first + kSteps, num_steps);
    int previous = -1;
    for (int step = first; step < end; ++step) {
      const SharedAddress slot = slots + ring.slot * slot_bytes;
      ops::hopper::wait(barriers.full[ring.slot], ring.parity);
      ops::hopper::begin_products();
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        const SharedAddress gate = slot + chunk * layout.gate_rows * kLineBytes;
        const SharedAddress x = slot + layout.gate_bytes<Tile>() + chunk * Tile::kXBytes;
        own.multiply(Operand::descriptor(gate + group * Tile::kBlocks * kBlockBytes),
                     Operand::descriptor(x));
      }
      ops::hopper::commit_products();
      if (previous >= 0) {
        ops::hopper::wait_for_products<1>();
        barriers.release(previous);
      }
      previous = ring.slot;
      ring.advance();
    }
    ops::hopper::wait_for_products<0>();
    own.end_block(first == 0);
    barriers.release(previous);
  }
}

/// Stores the totals, straight from the registers: eight lanes have neighbours in memory.
template <typename Element, typename Tile>
__device__ void store_logits(const LogitsArgs& args, const LogitSums<Element, Tile>& own) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto E = static_cast<int>(args.E);
  const int64_t first_token = int64_t{blockIdx.x} * Tile::kTokens;
  const auto num_tokens = static_cast<int>(min(int64_t{Tile::kTokens}, args.T - first_token));
  float* const tile = args.logits + first_token * E;
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
    const int first = (warp / 4 * Tile::kBlocks + i) * kBlock + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int expert = first + half * 8;
      if (expert >= E) break;
      const float bias = bias_of(args, expert);
#pragma unroll
      for (int n = 0; n < Tile::kTokens / 4; ++n) {
        const int token = n / 2 * 8 + lane % 4 * 2 + n % 2;
        const float logit = own.totals[i][n / 2 * 4 + half * 2 + n % 2] + bias;
        if (token < num_tokens) tile[token * E + expert] = logit;
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// A block computes one tile; one warp loads and the others multiply.
template <typename Element, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    logits_kernel(const __grid_constant__ LogitsMaps maps, const __grid_constant__ LogitsArgs args,
                  LogitsLayout layout) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte logits_memory[];
  __shared__ SlotBarriers barriers;
  const SharedAddress slots = ops::hopper::shared_address(first_slot(logits_memory));
  const auto thread = static_cast<int>(threadIdx.x);
  constexpr int kColumns = Tile::kChunks * kDepth;
  const auto num_steps = static_cast<int>((args.D + kColumns - 1) / kColumns);
  if (thread == 0) barriers.init(layout.num_slots, Tile::kMathThreads / 32);
  if (thread == Tile::kMathThreads) {
    ops::hopper::prefetch_map(&maps.x);
    ops::hopper::prefetch_map(&maps.gate);
  }
  __syncthreads();
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  if (thread < Tile::kMathThreads) {
    LogitSums<Element, Tile> own;
    multiply_slots<Element, Tile>(own, layout, barriers, slots, num_steps);
    store_logits<Element, Tile>(args, own);
  } else if (thread == Tile::kMathThreads) {
    load_slots<Tile>(maps, layout, barriers, slots, num_steps);
  } else if (blockIdx.x == 0) {
    for (int64_t i = thread - Tile::kMathThreads - 1; i < args.num_counts; i += 31) {
      args.counts[i] = 0;
    }
  }
#endif
}

template <typename Element, typename Tile>
void launch(const LogitsArgs& args, const LogitsMeans& means, cudaStream_t stream) {
  const auto layout = LogitsLayout::of<Tile>(args.E, args.D, means.shared_memory);
  ops::hopper::TensorMaps& maps = *means.maps;
  const LogitsMaps both{.gate = maps.get(layout.gate.spec(args.gate, args.x_dtype, args.D, args.E)),
                        .x = maps.get(layout.x.spec(args.x, args.x_dtype, args.D, args.T))};
  const int64_t num_tiles = (args.T + Tile::kTokens - 1) / Tile::kTokens;
  cuda::launch_early(logits_kernel<Element, Tile>,
                     {.blocks = static_cast<unsigned>(num_tiles),
                      .threads = Tile::kThreads,
                      .shared_bytes = static_cast<size_t>(layout.shared_bytes)},
                     stream, both, args, layout);
}

/// Calls work(tile) with a tile for these sizes, as a template argument.
template <typename Work>
void with_tile(int64_t T, int64_t E, const Work& work) {
  const int64_t num_sms = cuda::num_sms(cuda::current_device());
  const bool is_large = T * 4 >= num_sms * 64 * 3;  // keeps most SMs busy
  if (E > 256) return work(LogitsTile<32, 4, 2, 1>{});
  if (is_large) {
    if (E > 128) return work(LogitsTile<64, 4, 1, 1>{});
    if (E > 64) return work(LogitsTile<64, 2, 1, 2>{});
    return work(LogitsTile<64, 1, 1, 4>{});
  }
  if (E > 128) return work(LogitsTile<32, 4, 1, 1>{});
  if (E > 64) return work(LogitsTile<32, 2, 1, 2>{});
  work(LogitsTile<32, 1, 1, 4>{});
}

template <typename Element, typename Tile>
bool load_tile() {
  return load_kernel(logits_kernel<Element, Tile>, kWantedSharedBytes);
}

template <typename Element>
bool load_all() {
  return load_tile<Element, LogitsTile<64, 1, 1, 4>>() &&
         load_tile<Element, LogitsTile<64, 2, 1, 2>>() &&
         load_tile<Element, LogitsTile<64, 4, 1, 1>>() &&
         load_tile<Element, LogitsTile<32, 1, 1, 4>>() &&
         load_tile<Element, LogitsTile<32, 2, 1, 2>>() &&
         load_tile<Element, LogitsTile<32, 4, 1, 1>>() &&
         load_tile<Element, LogitsTile<32, 4, 2, 1>>();
}

}  // namespace

bool load_logits() {
  return load_all<BF16>() && load_all<F16>();
}

bool takes(const LogitsArgs& args, const LogitsMeans& means) {
  if (means.maps == nullptr) return false;
  const auto bits = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.gate) |
                    static_cast<uintptr_t>(args.D * 2);
  if (bits % 16 != 0 || args.E > kMostExperts) return false;
  bool fits = false;
  with_tile(args.T, args.E, [&]<typename Tile>(Tile) {
    fits = LogitsLayout::of<Tile>(args.E, args.D, means.shared_memory).fits(means.shared_memory);
  });
  return fits;
}

void launch_logits(const LogitsArgs& args, const LogitsMeans& means, cudaStream_t stream) {
  with_tile(args.T, args.E, [&]<typename Tile>(Tile) {
    if (args.x_dtype == DType::kBF16) {
      launch<BF16, Tile>(args, means, stream);
    } else {
      launch<F16, Tile>(args, means, stream);
    }
  });
}

}  // namespace crossdock::router::hopper
