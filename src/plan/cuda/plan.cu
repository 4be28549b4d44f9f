#include <algorithm>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/load_kernels.hpp"
#include "plan/cuda/device_plan.hpp"
#include "plan/cuda/plan_exchange.cuh"
#include "plan/cuda/plan_limits.hpp"

// A stable counting sort over all ranks. Every block counts a range of tokens, every warp of it a
// part of that range in (token, slot) order; the last block of each rank exchanges the counts with
// its peers and computes where this rank's rows of every expert begin; then each route computes its
// row. Nothing depends on the order in which blocks run. A scatter that computes the rows itself
// was measured: it loses more than the kernel that does so here takes.

namespace crossdock::cuda {
namespace {

constexpr int64_t kMostRoutesAlone = 2048;  // of a block that counts and places all routes
constexpr int64_t kRoutesPerBlock = 1024;
constexpr int64_t kMostBlocks = 64;
constexpr int kPlaceThreads = 256;
constexpr int64_t kCountBytes = 40 << 10;  // shared memory for the counts of a block's warps

__device__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// The expert of slot `slot` of a token, or -1; records the lowest bad route of this rank.
template <typename Id>
__device__ int32_t read_route(const PlanArgs& args, int64_t token, int slot) {
  const DeviceRouting& routing = args.routing;
  const int64_t first = token * args.shape.K;
  const auto* ids = static_cast<const Id*>(routing.expert_ids) + first;
  const Id id = ids[slot];
  const float weight = routing.weights[first + slot];
  if (id == -1 || (routing.mask != nullptr && routing.mask[token])) return -1;
  FaultCode fault = FaultCode::kNone;
  if (args.shape.reject_nonfinite && !isfinite(weight)) fault = FaultCode::kWeightNotFinite;
  for (int earlier = routing.ids_are_distinct ? slot : 0; earlier < slot; ++earlier) {
    if (ids[earlier] == id) fault = FaultCode::kExpertRepeated;
  }
  if (id < 0 || id >= args.shape.E) fault = FaultCode::kExpertRange;
  if (fault == FaultCode::kNone) return static_cast<int32_t>(id);
  atomicMin(reinterpret_cast<unsigned long long*>(&args.signals.state->bad_route),
            static_cast<unsigned long long>(first + slot) << 8 | static_cast<uint32_t>(fault));
  return -1;
}

// A warp counts its tokens, 32 routes at a time; lanes with the same expert are ranked by lane.
// Leaves {expert, number of earlier routes of this warp to it} in plan.targets.
template <typename Id>
__device__ void count_routes(const PlanArgs& args, uint32_t* warp_counts) {
  const int32_t E = args.shape.E;
  const auto K = static_cast<uint32_t>(args.shape.K);
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < num_warps * E;
       i += static_cast<int>(blockDim.x)) {
    warp_counts[i] = 0;
  }
  __syncthreads();
  const int64_t first_warp = static_cast<int64_t>(blockIdx.x) * num_warps;
  const int64_t warp_tokens = args.shares.warp_tokens;
  const int64_t first_token = min((first_warp + warp) * warp_tokens, args.routing.T);
  const int64_t first_route = first_token * K;
  const auto num_routes = static_cast<uint32_t>(min(warp_tokens, args.routing.T - first_token) * K);
  uint32_t* counts = warp_counts + static_cast<int64_t>(warp) * E;
  for (uint32_t base = 0; base < num_routes; base += 32) {
    const uint32_t i = base + static_cast<uint32_t>(lane);
    if (i + 32 < num_routes) {
      prefetch_line(static_cast<const Id*>(args.routing.expert_ids) + first_route + i + 32);
      prefetch_line(args.routing.weights + first_route + i + 32);
    }
    int32_t expert = -1;
    if (i < num_routes) {
      expert = read_route<Id>(args, first_token + i / K, static_cast<int>(i % K));
    }
    const uint32_t same = __match_any_sync(~0u, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    const uint32_t seen = expert >= 0 ? counts[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) counts[expert] = seen + static_cast<uint32_t>(__popc(same));
    __syncwarp();
    if (i < num_routes) {
      args.plan.targets[first_route + i] = {expert, static_cast<int32_t>(seen) + before};
    }
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < E; e += static_cast<int>(blockDim.x)) {
    constexpr int kInFlight = 8;
    uint32_t sum = 0;
    for (int w = 0; w < num_warps; w += kInFlight) {
      uint32_t part[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        part[i] = w + i < num_warps ? warp_counts[(w + i) * E + e] : 0;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (w + i < num_warps) {
          args.scratch.warp_sums[(first_warp + w + i) * E + e] = static_cast<int32_t>(sum);
        }
        sum += part[i];
      }
    }
    args.scratch.block_sums[static_cast<int64_t>(blockIdx.x) * E + e] = static_cast<int32_t>(sum);
  }
}

// The target of a route, from what count_routes left. base, owner [E]: of every expert.
__device__ RouteTarget target_of(const PlanArgs& args, int64_t route, const int32_t* base,
                                 const int32_t* owner) {
  const RouteTarget counted = args.plan.targets[route];
  const int32_t e = counted.rank;
  if (e < 0) return {-1, -1};
  const int64_t warp = route / (args.shares.warp_tokens * args.shape.K);
  const int64_t block = warp / args.shares.num_warps;
  const int32_t place = args.scratch.block_sums[block * args.shape.E + e] +
                        args.scratch.warp_sums[warp * args.shape.E + e] + counted.row;
  if (base[e] < 0 || place >= args.shape.capacity) return {-1, -1};
  return {owner[e], base[e] + place};
}

__device__ void place_route(const PlanArgs& args, int64_t route, const RouteTarget& target) {
  args.plan.targets[route] = target;
  args.plan.weights[route] = target.rank >= 0 ? args.routing.weights[route] : 0.0f;
}

// Places the routes that this block alone has counted.
__device__ void place_all(const PlanArgs& args, const SegmentMemory& segments) {
  constexpr int kInFlight = 2;
  const int64_t num_routes = args.routing.T * args.shape.K;
  const int64_t stride = blockDim.x;
  for (int64_t first = threadIdx.x; first < num_routes; first += kInFlight * stride) {
    RouteTarget targets[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t route = first + i * stride;
      if (route < num_routes) targets[i] = target_of(args, route, segments.base, segments.owner);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t route = first + i * stride;
      if (route < num_routes) place_route(args, route, targets[i]);
    }
  }
}

// Reads ahead what the exchange needs.
__device__ void prefetch_tables(const PlanArgs& args) {
  constexpr int kLine = 32;
  for (int i = static_cast<int>(threadIdx.x) * kLine; i < args.shape.E;
       i += static_cast<int>(blockDim.x) * kLine) {
    prefetch_line(args.shape.owner + i);
    prefetch_line(args.shape.by_owner + i);
  }
  if (threadIdx.x != 0) return;
  prefetch_line(args.shape.owner_offsets);
  prefetch_line(args.signals.state);
}

// A block counts a range of tokens; the last exchanges counts; a sole block also places routes.
template <typename Id>
__global__ void __launch_bounds__(kMostPlanWarps * 32, 2)
    count_kernel(const __grid_constant__ PlanArgs args) {
  extern __shared__ int64_t memory[];
  prefetch_tables(args);
  wait_for_previous_kernel();
  const uint32_t epoch = args.signals.state->words_epoch + 1;
  count_routes<Id>(args, reinterpret_cast<uint32_t*>(memory));
  if (gridDim.x > 1 && !last_block(args.signals, /*writes_to_peers=*/false)) return;
  __syncthreads();
  const SegmentMemory segments = SegmentMemory::carve(memory, args.shape.E);
  exchange_counts(args, epoch, segments);
  if (gridDim.x == 1) place_all(args, segments);
}

// A thread places a route.
__global__ void __launch_bounds__(kPlaceThreads)
    place_kernel(const __grid_constant__ PlanArgs args) {
  allow_next_kernel();  // when it starts, the counts of all ranks are there: nobody needs its room
  wait_for_previous_kernel();
  const int64_t route = static_cast<int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x;
  if (route >= args.routing.T * args.shape.K) return;
  place_route(args, route, target_of(args, route, args.scratch.route_base, args.shape.owner));
}

}  // namespace

PlanShares plan_shares(int64_t T, int32_t K, int32_t E, int num_sharing) {
  const int64_t fitting = kCountBytes / (E * static_cast<int64_t>(sizeof(uint32_t)));
  PlanShares shares{};
  shares.num_blocks = 1;
  if (T * K > kMostRoutesAlone) {
    const int64_t most = std::max(2 * num_sms(current_device()) / num_sharing, 1);  // at once
    const int64_t wanted = (T * K + kRoutesPerBlock - 1) / kRoutesPerBlock;
    shares.num_blocks = static_cast<int32_t>(std::min({wanted, most, kMostBlocks}));
  }
  shares.num_warps = kMostPlanWarps;
  while (shares.num_warps > 1 && shares.num_warps > fitting) shares.num_warps /= 2;
  const int64_t all_warps = int64_t{shares.num_blocks} * shares.num_warps;
  shares.warp_tokens = std::max<int64_t>((T + all_warps - 1) / all_warps, 1);
  return shares;
}

int64_t plan_words(int64_t E) {
  return kHeaderWords + E;
}

void load_plan() {
  load_kernels(count_kernel<int32_t>, count_kernel<int64_t>, place_kernel);
  const int64_t most = shared_memory_per_block(current_device()) - kPlanFixedBytes;
  const auto bytes = static_cast<int>(std::min(most, segment_bytes(kMaxExperts)));
  for (auto* kernel : {count_kernel<int32_t>, count_kernel<int64_t>}) {
    cudaFuncAttributes attributes{};
    CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
    CROSSDOCK_ASSERT(static_cast<int64_t>(attributes.sharedSizeBytes) <= kPlanFixedBytes);
    CROSSDOCK_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }
}

void launch_plan(const PlanArgs& args, cudaStream_t stream) {
  const int32_t E = args.shape.E;
  CROSSDOCK_ASSERT(E <= kMaxExperts);
  CROSSDOCK_ASSERT(args.signals.max_words >= plan_words(E));
  const int num_blocks = args.shares.num_blocks;
  const int64_t count_bytes =
      int64_t{args.shares.num_warps} * E * static_cast<int64_t>(sizeof(uint32_t));
  const LaunchShape shape{
      .blocks = static_cast<unsigned>(num_blocks),
      .threads = static_cast<unsigned>(args.shares.num_warps) * 32,
      .shared_bytes = static_cast<size_t>(std::max(count_bytes, segment_bytes(E)))};
  auto* kernel = args.routing.ids_are_64_bit ? count_kernel<int64_t> : count_kernel<int32_t>;
  // Blocks that start early must leave room for kernels that the previous one may be waiting for.
  if (num_blocks * args.num_sharing <= num_sms(current_device()) / 2) {
    launch_early(kernel, shape, stream, args);
  } else {
    kernel<<<shape.blocks, shape.threads, shape.shared_bytes, stream>>>(args);
    CROSSDOCK_CUDA(cudaGetLastError());
  }
  if (num_blocks == 1) return;
  const int64_t num_routes = args.routing.T * args.shape.K;
  const auto blocks = static_cast<unsigned>((num_routes + kPlaceThreads - 1) / kPlaceThreads);
  launch_early(place_kernel, blocks, kPlaceThreads, stream, args);
}

}  // namespace crossdock::cuda
