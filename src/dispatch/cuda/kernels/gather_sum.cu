#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/row_vector.cuh"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/cuda/kernels/zero_rows.cuh"

namespace crossdock::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kBlocksPerSm = 6;            // resident at once, for most kernels
constexpr int kPersistentBlocksPerSm = 4;  // with an SM limit
constexpr int kBarrierThreads = 96;
static_assert(kBarrierThreads >= kMaxPeers);
constexpr int64_t kBytesAhead = 4 << 20;  // prefetched during a barrier, by all ranks on the GPU
constexpr int64_t kChunkBytes = 8 << 10;  // prefetched by one thread
constexpr int kChunksPerBlock = 16;       // more would keep an SM busy for longer than the barrier

// Vectors of each row that a lane has in flight, and blocks per SM that must fit with the registers
// this takes. kFew: one wave of blocks sums all tokens. Measured: with small K or few tokens, more
// vectors in flight outweigh fewer blocks.
template <int kBatch, bool kMore, bool kFew = false>
struct Depth {
  static constexpr int kUnroll = kMore ? 1 : kBatch == 8 ? (kFew ? 2 : 1) : kBatch == 4 ? 3 : 2;
  static constexpr int kBlocks = kMore ? 5 : kBatch == 4 || kFew ? 4 : kBlocksPerSm;
};

// Whether few tokens have a separate kernel.
template <int kBatch, bool kMore>
inline constexpr bool kHasFew = kBatch == 8 && !kMore;

// The rows of up to kBatch slots of one token; null if there is no kept route or a peer has not
// arrived.
template <typename Vector, int kBatch, bool kFound>
struct SlotBatch {
  const Vector* rows[kBatch];
  float weights[kBatch];

  __device__ void read(const GatherSumKernelArgs& args, int64_t row_vectors, int64_t token,
                       int first_slot, bool has_peers) {
    RouteTarget targets[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {  // all loads before the first use
      const bool is_slot = first_slot + i < args.K;
      const int64_t route = token * args.K + first_slot + i;
      targets[i] = is_slot ? args.targets[route] : RouteTarget{-1, -1};
      weights[i] = is_slot && args.weights != nullptr ? args.weights[route] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool has_row = targets[i].rank >= 0 && has_peers;
      const std::byte* first_row = has_row ? args.rows.of<kFound>(targets[i].rank) : nullptr;
      rows[i] = has_row ? reinterpret_cast<const Vector*>(first_row) + targets[i].row * row_vectors
                        : nullptr;
    }
  }
};

// sums += weight * row, slot by slot, for up to kUnroll vectors of the row, 32 apart. Starts all
// loads before it uses the first.
template <typename Vector, int kBatch, bool kFound, int kUnroll, int kCount>
__device__ void add_slots(const SlotBatch<Vector, kBatch, kFound>& slots, int64_t first,
                          int64_t end, float (&sums)[kUnroll][kCount]) {
  Vector values[kBatch][kUnroll];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (slots.rows[i] == nullptr) continue;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * 32 < end) values[i][u] = load_once(slots.rows[i] + first + u * 32);
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (slots.rows[i] == nullptr) continue;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sums[u][j] = __fmaf_rn(slots.weights[i], widen(values[i][u].elements[j]), sums[u][j]);
      }
    }
  }
}

// Makes the sum of all rows of a token its only partial sum: rounded, and added to +0.
template <typename Element, int kCount>
__device__ void finish_whole(PartialSums whole_sum, float (&sums)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (whole_sum == PartialSums::kRowType) sums[j] = widen(narrow<Element>(sums[j]));
    sums[j] = __fadd_rn(0.0f, sums[j]);
  }
}

// A warp takes pieces of tokens in turn; a lane sums vectors of all K rows. kMore: K is larger than
// kBatch. kFound: of args.rows (PeerPointers). kFew: see Depth.
template <typename Element, typename Out, int kCount, int kBatch, bool kMore, bool kFound,
          bool kFew = false>
__global__ void __launch_bounds__(kWarps * 32, Depth<kBatch, kMore, kFew>::kBlocks)
    gather_sum_kernel(const __grid_constant__ GatherSumKernelArgs args, int pieces,
                      int piece_vectors) {
  using Vector = RowVector<Element, kCount>;
  constexpr int kUnroll = Depth<kBatch, kMore, kFew>::kUnroll;
  wait_for_previous_kernel();
  if (args.awaits_peers) peer_arrival(args.signals, args.operation);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row_vectors = args.D / kCount;
  const int64_t num_tasks = args.T * pieces;
  const int64_t first_task = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (int64_t task = first_task; task < num_tasks;
       task += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t token = task / pieces;
    const int64_t begin = (task - token * pieces) * piece_vectors;
    const int64_t end = min(begin + piece_vectors, row_vectors);
    auto* out = reinterpret_cast<RowVector<Out, kCount>*>(args.out) + token * row_vectors;
    const bool has_peers = !is_poisoned(args.signals);
    SlotBatch<Vector, kBatch, kFound> slots;
    slots.read(args, row_vectors, token, 0, has_peers);
    for (int64_t first = begin + lane; first < end; first += 32 * kUnroll) {
      float sums[kUnroll][kCount] = {};
      add_slots(slots, first, end, sums);
      for (int slot = kBatch; kMore && slot < args.K; slot += kBatch) {
        SlotBatch<Vector, kBatch, kFound> more;
        more.read(args, row_vectors, token, slot, has_peers);
        add_slots(more, first, end, sums);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * 32 >= end) continue;
        if (args.whole_sum != PartialSums::kNone) finish_whole<Element>(args.whole_sum, sums[u]);
        RowVector<Out, kCount> result;
#pragma unroll
        for (int j = 0; j < kCount; ++j) result.elements[j] = narrow<Out>(sums[u][j]);
        out[first + u * 32] = result;  // may stay in the cache: out is read next
      }
    }
  }
  if (ends_alone(args.signals)) return;
  if (last_block(args.signals, /*writes_to_peers=*/false) &&
      !peer_barrier(args.signals, args.operation, args.awaits_peers)) {
    zero_bytes(args.out, args.T * args.D * static_cast<int64_t>(sizeof(Out)));
  }
}

// Block 0 is the barrier; a thread of any other block prefetches some of this rank's rows.
__global__ void gather_barrier_kernel(const __grid_constant__ PeerSignals signals,
                                      Operation operation, const std::byte* rows,
                                      int64_t num_bytes) {
  wait_for_previous_kernel();
  if (blockIdx.x == 0) {
    peer_barrier(signals, operation);
    allow_next_kernel();  // not earlier: that kernel could take the room of a peer's barrier
    return;
  }
#if __CUDA_ARCH__ >= 900
  const int64_t first = ((blockIdx.x - 1) * int64_t{kChunksPerBlock} + threadIdx.x) * kChunkBytes;
  if (threadIdx.x >= kChunksPerBlock || first >= num_bytes) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rows + first),
               "r"(static_cast<uint32_t>(min(kChunkBytes, num_bytes - first)))
               : "memory");
#endif
}

// With a few waves of blocks, the last wave leaves SMs idle for a long time: persistent blocks on
// this rank's share of the GPU are faster. Returns that share, or 0 for blocks that end with their
// task, which are faster with many waves (they keep more loads in flight) and with very few (their
// tasks start immediately).
int persistent_sms(int64_t wanted_blocks, int num_sharing) {
  const int all_sms = num_sms(current_device());
  const int64_t at_once = int64_t{all_sms} * kBlocksPerSm;
  const int64_t blocks = wanted_blocks * num_sharing;
  const bool is_between = blocks >= 3 * at_once && blocks < 8 * at_once;
  return is_between ? std::max(all_sms / num_sharing, 1) : 0;
}

// Pieces per row with which one wave of blocks sums all tokens; 0: there are too many tokens.
template <int kBatch, bool kMore>
int64_t pieces_of_one_wave(const GatherSumKernelArgs& args, int sms) {
  constexpr int kBlocks = Depth<kBatch, kMore, kHasFew<kBatch, kMore>>::kBlocks;
  const int64_t share = num_sms(current_device()) / std::max(args.num_sharing, 1);
  const int64_t blocks = sms > 0 ? int64_t{sms} * kPersistentBlocksPerSm : share * kBlocks;
  const int64_t pieces = blocks * kWarps / std::max<int64_t>(args.T, 1);
  return pieces >= 2 ? pieces : 0;
}

// Vectors per piece of a row, chosen to give every SM enough warps: few tokens are summed in one
// wave by this rank's SMs, more tokens in many waves.
int64_t cut_rows(const GatherSumKernelArgs& args, int64_t row_vectors, int sms,
                 int64_t pieces_at_once) {
  constexpr int64_t kLeast = 128;
  if (pieces_at_once > 0) {
    const int64_t pieces = std::clamp<int64_t>(row_vectors / kLeast, 1, pieces_at_once);
    return ((row_vectors + pieces - 1) / pieces + 31) / 32 * 32;
  }
  const int64_t all_sms = sms > 0 ? sms : num_sms(current_device());
  const int64_t wanted_warps = all_sms * kBlocksPerSm * kWarps;
  int64_t piece_vectors = (row_vectors + 31) / 32 * 32;
  while (piece_vectors > kLeast &&
         args.T * ((row_vectors + piece_vectors - 1) / piece_vectors) < wanted_warps) {
    piece_vectors = (piece_vectors / 2 + 31) / 32 * 32;
  }
  return piece_vectors;
}

template <typename Element, typename Out, int kCount, int kBatch, bool kMore, bool kFound>
void launch_kernel(const GatherSumKernelArgs& args, int sms, cudaStream_t stream) {
  const int64_t row_vectors = args.D / kCount;
  const int64_t pieces_at_once = pieces_of_one_wave<kBatch, kMore>(args, sms);
  const int64_t piece_vectors = cut_rows(args, row_vectors, sms, pieces_at_once);
  const int64_t pieces = std::max<int64_t>((row_vectors + piece_vectors - 1) / piece_vectors, 1);
  const int64_t tasks = std::max<int64_t>(args.T * pieces, 1);
  const int64_t wanted_blocks = (tasks + kWarps - 1) / kWarps;
  if (sms == 0) sms = persistent_sms(wanted_blocks, std::max(args.num_sharing, 1));
  const int64_t most_blocks = sms > 0 ? int64_t{sms} * kPersistentBlocksPerSm : int64_t{1} << 30;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted_blocks, most_blocks));
  auto* kernel = gather_sum_kernel<Element, Out, kCount, kBatch, kMore, kFound>;
  if constexpr (kHasFew<kBatch, kMore>) {
    if (pieces_at_once > 0) {
      kernel = gather_sum_kernel<Element, Out, kCount, kBatch, kMore, kFound, true>;
    }
  }
  launch_early(kernel, blocks, kWarps * 32, stream, args, static_cast<int>(pieces),
               static_cast<int>(piece_vectors));
}

template <typename Element, typename Out, int kCount, int kBatch, bool kMore>
void launch(const GatherSumKernelArgs& args, int sms, cudaStream_t stream) {
  if (args.rows.found != nullptr) {
    launch_kernel<Element, Out, kCount, kBatch, kMore, true>(args, sms, stream);
  } else {
    launch_kernel<Element, Out, kCount, kBatch, kMore, false>(args, sms, stream);
  }
}

template <typename Element, typename Out, int kCount>
void launch_for_slots(const GatherSumKernelArgs& args, int sms, cudaStream_t stream) {
  if (args.K <= 2) {
    launch<Element, Out, kCount, 2, false>(args, sms, stream);
  } else if (args.K <= 4) {
    launch<Element, Out, kCount, 4, false>(args, sms, stream);
  } else if (args.K <= 8) {
    launch<Element, Out, kCount, 8, false>(args, sms, stream);
  } else {
    launch<Element, Out, kCount, 4, true>(args, sms, stream);
  }
}

template <typename Element, typename Out>
void launch_for_width(const GatherSumKernelArgs& args, int sms, cudaStream_t stream) {
  uint64_t bits =
      reinterpret_cast<uint64_t>(args.out) | static_cast<uint64_t>(args.D) * sizeof(Element);
  for (const std::byte* rows : args.rows.known) bits |= reinterpret_cast<uint64_t>(rows);
  if (bits % 16 == 0) {
    launch_for_slots<Element, Out, kWide<Element>>(args, sms, stream);
  } else {
    launch_for_slots<Element, Out, 1>(args, sms, stream);
  }
}

template <typename Element, typename Out, int kCount, bool kFound>
void load_kind() {
  load_kernels(gather_sum_kernel<Element, Out, kCount, 2, false, kFound>,
               gather_sum_kernel<Element, Out, kCount, 4, false, kFound>,
               gather_sum_kernel<Element, Out, kCount, 8, false, kFound>,
               gather_sum_kernel<Element, Out, kCount, 8, false, kFound, true>,
               gather_sum_kernel<Element, Out, kCount, 4, true, kFound>);
}

template <typename Element, typename Out, int kCount>
void load_for_width() {
  load_kind<Element, Out, kCount, false>();
  load_kind<Element, Out, kCount, true>();
}

template <typename Element, typename Out = Element>
void load_for() {
  load_for_width<Element, Out, kWide<Element>>();
  load_for_width<Element, Out, 1>();
}

}  // namespace

void load_gather_sum() {
  load_kernels(gather_barrier_kernel);
  load_for<float>();
  load_for<BF16>();
  load_for<F16>();
  load_for<float, BF16>();
  load_for<float, F16>();
}

void launch_gather_barrier(const GatherSumKernelArgs& args, int64_t own_bytes,
                           cudaStream_t stream) {
  if (args.signals.P <= 1) return;
  const std::byte* rows = args.rows.known[args.signals.rank];
  const bool is_aligned = reinterpret_cast<uint64_t>(rows) % 16 == 0;
  const int64_t wanted = std::min(own_bytes, kBytesAhead / std::max(args.num_sharing, 1));
  const int64_t num_bytes = is_aligned ? wanted / 16 * 16 : 0;
  const int64_t per_block = kChunkBytes * kChunksPerBlock;
  const auto blocks = static_cast<unsigned>(1 + (num_bytes + per_block - 1) / per_block);
  launch_early(gather_barrier_kernel, blocks, kBarrierThreads, stream, args.signals, args.operation,
               rows, num_bytes);
}

void launch_gather_sum(const GatherSumKernelArgs& args, int sms, cudaStream_t stream) {
  with_element(args.out_dtype, [&]<typename Out>(Out) {
    if (args.dtype == args.out_dtype) {
      launch_for_width<Out, Out>(args, sms, stream);
    } else {
      launch_for_width<float, Out>(args, sms, stream);
    }
  });
}

}  // namespace crossdock::cuda
