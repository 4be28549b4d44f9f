#include <algorithm>
#include <type_traits>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "dispatch/cuda/kernels/scatter.hpp"
#include "dispatch/cuda/kernels/zero_rows.cuh"

// Writes dominate, and scattered rows are fastest when each is written in one go: a block holds a
// whole token in registers and stores it row by row, with streaming stores (evicted first from the
// L2 cache). Blocks end with their token, which keeps more stores in flight than persistent blocks;
// measured against warps per token and bulk copies through shared memory.
//
// Memory loses time whenever it switches between reads and writes, so tokens are read in bursts:
// some blocks prefetch the contiguous tokens of the next burst into the L2 cache, and the rest of
// the time memory is only written.
//
// Other ranks must not continue before all stores have arrived. Blocks that wait for their stores
// delay the tokens of the next blocks. Where this costs more than a launch, a second kernel, which
// starts when all stores have arrived, waits instead: plan and dispatch of Qwen3 then take 628
// instead of 647 us. With long rows and many tokens the stores of fewer blocks are enough, and
// nothing is gained.

namespace crossdock::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kInFlight = 8;  // vectors of a thread: a row of 16 KiB at once
constexpr int kSlotsAtOnce = 32;
constexpr int kBlocksPerSm = 8;
constexpr int kSharedBlocksPerSm = 4;  // if persistent blocks occupy half of the GPU or more
constexpr int kTokensAhead = 2;  // prefetched by a persistent block before the previous kernel ends
constexpr int64_t kBurstBytes = int64_t{11} << 19;  // measured: 5 to 6 MiB is best on an H200
constexpr int kPrefetchRows = 4;                    // prefetched by one block
constexpr int64_t kLongRow = 8 << 10;
constexpr int64_t kManyBytes = 32 << 20;  // stored by one call
constexpr int kEndThreads = 128;
static_assert(kEndThreads >= kMaxPeers);

__device__ void prefetch_to_l2(const std::byte* from, int64_t num_bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from),
               "r"(static_cast<uint32_t>(num_bytes))
               : "memory");
#endif
}

__device__ void prefetch_token(const ScatterArgs& args, int64_t token) {
  if (token >= args.T) return;
  const ScatterPart& part = args.parts[0];
  prefetch_to_l2(part.tokens + token * part.row_bytes, part.row_bytes);
}

// Prefetches the first burst of `burst` tokens, or the first tokens that persistent blocks take; 0:
// no prefetch. For use before the previous kernel has ended: memory has little to do then, and
// prefetching tokens before they are written does no harm.
__device__ void prefetch_first(const ScatterArgs& args, int64_t burst) {
  if (burst == 0 || threadIdx.x >= kPrefetchRows) return;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kPrefetchRows + threadIdx.x;
  if (gridDim.x < args.T) {
    if (threadIdx.x < kTokensAhead) {
      prefetch_token(args, blockIdx.x + static_cast<int64_t>(threadIdx.x) * gridDim.x);
    }
  } else if (place < burst) {
    prefetch_token(args, place);
  }
}

// The first blocks of a burst prefetch the next one.
__device__ void prefetch_next(const ScatterArgs& args, int64_t burst, int64_t token) {
  if (burst == 0 || threadIdx.x >= kPrefetchRows) return;
  const int64_t place = token % burst * kPrefetchRows + threadIdx.x;
  if (place < burst) prefetch_token(args, (token / burst + 1) * burst + place);
}

// SMs are not equally fast: persistent blocks take the remaining tokens one by one.
__device__ int64_t take_token(const ScatterArgs& args) {
  return int64_t{gridDim.x} + atomicAdd(&args.signals.state->tokens_taken, 1u);
}

// Copies row `token` of one part to `slots` targets, kHeld vectors per thread at a time. kFound: of
// part.rows (PeerPointers).
template <typename Vector, int kHeld, bool kFound>
__device__ void copy_row(const ScatterPart& part, int64_t token, const RouteTarget* targets,
                         int slots) {
  const int64_t vectors = part.row_bytes / static_cast<int64_t>(sizeof(Vector));
  const auto* from = reinterpret_cast<const Vector*>(part.tokens + token * part.row_bytes);
#pragma unroll 1
  for (int64_t first = threadIdx.x; first < vectors; first += kThreads * kHeld) {
    Vector values[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * kThreads < vectors) values[i] = __ldcs(from + first + i * kThreads);
    }
#pragma unroll 1  // short code starts sooner
    for (int slot = 0; slot < slots; ++slot) {
      const RouteTarget target = targets[slot];
      if (target.rank < 0) continue;
      auto* to = reinterpret_cast<Vector*>(part.rows.of<kFound>(target.rank) +
                                           target.row * part.row_bytes);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * kThreads < vectors) __stcs(to + first + i * kThreads, values[i]);
      }
    }
  }
}

// A block takes tokens in turn; a thread moves vectors of a row. Rows of the first part are a
// multiple of Vector, rows of the second (fp8: scales, few bytes) of Word; void: no second part. If
// a peer has not arrived, the kernel scatters nothing. ends_apart: scatter_end_kernel follows.
template <typename Vector, typename Word, bool kFound>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    scatter_kernel(const __grid_constant__ ScatterArgs args, const __grid_constant__ int64_t burst,
                   const __grid_constant__ bool ends_apart) {
  __shared__ RouteTarget targets[kSlotsAtOnce];
  __shared__ bool has_ended;     // the channel has ended
  __shared__ int64_t coming[2];  // the tokens after the current one
  const bool is_persistent = gridDim.x < args.T;
  const bool takes = is_persistent && threadIdx.x == kThreads - 1;
  if (ends_apart) allow_next_kernel();  // a single small block
  prefetch_first(args, burst);
  wait_for_previous_kernel();
  if (args.awaits_peers) peer_arrival(args.signals, args.operation);
  if (takes) coming[1] = take_token(args);
  for (int64_t token = blockIdx.x; token < args.T; token = is_persistent ? coming[0] : args.T) {
    int64_t taken = 0;
    if (!is_persistent) prefetch_next(args, burst, token);
    if (takes) {
      if (burst > 0) prefetch_token(args, coming[1]);
      taken = take_token(args);  // not needed until this token is copied
    }
    for (int first = 0; first < args.K; first += kSlotsAtOnce) {
      const int slots = min(args.K - first, kSlotsAtOnce);
      const int64_t route = token * args.K + first + threadIdx.x;
      if (static_cast<int>(threadIdx.x) < slots) {
        RouteTarget target = args.targets[route];
        const bool is_dead = is_poisoned(args.signals);
        if (is_dead) target.rank = -1;
        if (threadIdx.x == 0) has_ended = is_dead;
        targets[threadIdx.x] = target;
        if (args.weights != nullptr && target.rank >= 0) {
          args.row_weights.of<kFound>(target.rank)[target.row] = args.weights[route];
        }
      }
      __syncthreads();
      copy_row<Vector, kInFlight, kFound>(args.parts[0], token, targets, slots);
      if constexpr (!std::is_void_v<Word>) {
        copy_row<Word, 1, kFound>(args.parts[1], token, targets, slots);
      }
      __syncthreads();
    }
    if (!is_persistent) continue;
    if (takes) {
      coming[0] = coming[1];
      coming[1] = taken;
    }
    __syncthreads();
  }
  const bool ends_alone = args.signals.P <= 1 && args.T > 0 && !has_ended;
  if (!is_persistent && (ends_apart || ends_alone)) return;
  if (!last_block(args.signals)) return;
  if (threadIdx.x == 0) args.signals.state->tokens_taken = 0;
  if (!peer_barrier(args.signals, args.operation, args.awaits_peers)) zero_own_parts(args);
}

// A single block, which ends a scatter for all ranks.
//
// It needs no fence for what the blocks before it stored in peers' memory. In PTX,
// griddepcontrol.wait returns once the grid before has completed and all its memory operations are
// performed and visible to this grid; like the boundary of two kernels in a stream, which it stands
// for, it makes the end of that grid synchronize with what follows. Each store then precedes the
// release stores of peer_barrier in causality order, which does not depend on the thread that
// stored. Their scope is the system, so a peer that acquires the flag sees the row. last_block
// needs its fence because its grid has not ended.
__global__ void scatter_end_kernel(const __grid_constant__ ScatterArgs args) {
  wait_for_previous_kernel();
  if (!peer_barrier(args.signals, args.operation, args.awaits_peers)) zero_own_parts(args);
}

bool ends_apart(const ScatterArgs& args, int64_t num_blocks) {
  if (args.signals.P <= 1) return false;
  const int64_t row_bytes = args.parts[0].row_bytes;
  const bool is_persistent = num_blocks < args.T;
  const bool has_one_wave = num_blocks <= int64_t{num_sms(current_device())} * kBlocksPerSm;
  const bool pays = args.is_captured || args.T * args.K * row_bytes >= kManyBytes;
  return !is_persistent && pays && (row_bytes <= kLongRow || has_one_wave);
}

// Blocks of a kernel on `sms` SMs. Few SMs need as many blocks as fit to have enough stores in
// flight; many SMs keep memory busy with fewer blocks, whose stores are closer together.
int64_t persistent_blocks(const ScatterArgs& args, int sms) {
  const int occupied = sms * std::max(args.num_sharing, 1);
  const bool is_shared = 2 * occupied >= num_sms(current_device());
  return int64_t{sms} * (is_shared ? kSharedBlocksPerSm : kBlocksPerSm);
}

template <typename Vector, typename Word>
void launch(const ScatterArgs& args, int sms, cudaStream_t stream) {
  const int64_t most = sms > 0 ? persistent_blocks(args, sms) : int64_t{1} << 30;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(args.T, 1, most));
  const int64_t row_bytes = args.parts[0].row_bytes;
  int64_t burst = 0;
  if (sizeof(Vector) == 16 && row_bytes < kBurstBytes) {
    burst = std::max<int64_t>(kBurstBytes / row_bytes, 2);
  }
  const bool apart = ends_apart(args, blocks);
  auto* kernel = args.parts[0].rows.found != nullptr ? scatter_kernel<Vector, Word, true>
                                                     : scatter_kernel<Vector, Word, false>;
  launch_early(kernel, blocks, kThreads, stream, args, burst, apart);
  if (apart) launch_early(scatter_end_kernel, 1, kEndThreads, stream, args);
}

template <typename Vector>
void launch_for_word(const ScatterArgs& args, int sms, cudaStream_t stream) {
  if (args.num_parts == 1) {
    launch<Vector, void>(args, sms, stream);
  } else if (vector_bytes(args.parts[1]) >= 4) {
    launch<Vector, uint32_t>(args, sms, stream);
  } else {
    launch<Vector, uint8_t>(args, sms, stream);
  }
}

template <typename Vector, bool kFound>
void load_kind() {
  load_kernels(scatter_kernel<Vector, void, kFound>, scatter_kernel<Vector, uint32_t, kFound>,
               scatter_kernel<Vector, uint8_t, kFound>);
}

template <typename Vector>
void load_for() {
  load_kind<Vector, false>();
  load_kind<Vector, true>();
}

}  // namespace

void load_scatter() {
  load_kernels(scatter_end_kernel);
  load_for<uint4>();
  load_for<uint32_t>();
  load_for<uint16_t>();
  load_for<uint8_t>();
}

void launch_scatter(const ScatterArgs& args, int sms, cudaStream_t stream) {
  const int64_t bytes = vector_bytes(args.parts[0]);
  if (bytes == 16) {
    launch_for_word<uint4>(args, sms, stream);
  } else if (bytes >= 4) {
    launch_for_word<uint32_t>(args, sms, stream);
  } else if (bytes == 2) {
    launch_for_word<uint16_t>(args, sms, stream);
  } else {
    launch_for_word<uint8_t>(args, sms, stream);
  }
}

}  // namespace crossdock::cuda
