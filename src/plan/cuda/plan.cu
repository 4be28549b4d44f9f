#include <algorithm>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "plan/cuda/device_plan.hpp"
#include "plan/cuda/plan_exchange.cuh"
#include "plan/cuda/plan_limits.hpp"

// A stable counting sort over all ranks. Every block counts a range of tokens, every warp of it a
// part of that range in (token, slot) order; the last block of each rank exchanges the counts with
// its peers and computes where this rank's rows of every expert begin; then each route computes its
// row. Nothing depends on the order in which blocks run. Letting the scatter compute the rows was
// measured to be slower: it costs more than place_kernel takes.
//
// With few routes, as in decoding, one block does all of this and keeps everything in shared
// memory: the plan then takes hardly longer than the exchange.

namespace crossdock::cuda {
namespace {

constexpr int64_t kMostRoutesOfOne = 2048;  // of a block that counts and places all routes
constexpr int64_t kMostExpertsOfOne = 1024;
constexpr int64_t kRoutesPerBlock = 1024;
constexpr int64_t kMostBlocks = 64;
constexpr int kPlaceThreads = 256;
constexpr int64_t kCountBytes = 40 << 10;  // shared memory for the counts of a block's warps

__device__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// A route as read from memory.
template <typename Id>
struct ReadRoute {
  Id id;  // -1: there is no route
  float weight;
};

// The routes that a warp counts: all slots of its tokens.
struct WarpShare {
  int64_t first_token;
  int64_t first_route;
  uint32_t num_routes;

  static __device__ WarpShare of(const PlanArgs& args, int64_t warp) {
    const int64_t first_token = min(warp * args.shares.warp_tokens, args.routing.T);
    const int64_t num_tokens = min(args.shares.warp_tokens, args.routing.T - first_token);
    return {first_token, first_token * args.shape.K,
            static_cast<uint32_t>(num_tokens * args.shape.K)};
  }
};

__device__ int warp_of_thread() {
  return static_cast<int>(threadIdx.x) / 32;
}
__device__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % 32;
}
// Index of this warp among all warps of the rank.
__device__ int64_t global_warp() {
  return static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp_of_thread();
}

template <typename Id>
__device__ ReadRoute<Id> read_route(const PlanArgs& args, const WarpShare& share, uint32_t i) {
  if (i >= share.num_routes) return {-1, 0.0f};
  const DeviceRouting& routing = args.routing;
  const int64_t route = share.first_route + i;
  ReadRoute<Id> result{static_cast<const Id*>(routing.expert_ids)[route], routing.weights[route]};
  if (routing.mask != nullptr) {
    const uint32_t token = i / static_cast<uint32_t>(args.shape.K);
    if (routing.mask[share.first_token + token]) result.id = -1;
  }
  return result;
}

// Records the lowest bad route of this rank. is_repeated: an earlier slot of the token has the same
// expert.
template <typename Id>
__device__ void check_route(const PlanArgs& args, int64_t route, const ReadRoute<Id>& read,
                            bool is_repeated) {
  FaultCode fault = FaultCode::kNone;
  if (args.shape.reject_nonfinite && !isfinite(read.weight)) fault = FaultCode::kWeightNotFinite;
  if (is_repeated) fault = FaultCode::kExpertRepeated;
  if (read.id < 0 || read.id >= args.shape.E) fault = FaultCode::kExpertRange;
  if (read.id == -1 || fault == FaultCode::kNone) return;
  atomicMin(reinterpret_cast<unsigned long long*>(&args.signals.state->bad_route),
            static_cast<unsigned long long>(route) << 8 | static_cast<uint32_t>(fault));
}

// Whether an earlier slot of the token has the same id. same: lanes with the same expert. Lower
// lanes hold the preceding routes; a token's first slots may belong to an earlier step.
template <typename Id>
__device__ bool is_repeated(const PlanArgs& args, int64_t route, uint32_t slot, Id id,
                            uint32_t same) {
  const auto lane = static_cast<uint32_t>(lane_of_thread());
  const uint32_t before = same & ((1u << lane) - 1);
  if (slot <= lane) return (before >> (lane - slot)) != 0;
  const auto* ids = static_cast<const Id*>(args.routing.expert_ids) + route - slot;
  bool found = before != 0;
#pragma unroll 1
  for (uint32_t earlier = 0; earlier < slot - lane; ++earlier) found = found || ids[earlier] == id;
  return found;
}

// A warp counts its tokens, 32 routes at a time; lanes with the same expert are ranked by lane.
// Calls note(i, {expert, number of earlier routes of this warp to it}) for its route i. Bad routes
// that name an expert are counted too; the plan is refused anyway.
template <typename Id, typename Note>
__device__ void count_routes(const PlanArgs& args, const WarpShare& share, uint32_t* warp_counts,
                             const Note& note) {
  const int32_t E = args.shape.E;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int lane = lane_of_thread();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_warps * E;
       i += static_cast<int>(blockDim.x)) {
    warp_counts[i] = 0;
  }
  ReadRoute<Id> next = read_route<Id>(args, share, static_cast<uint32_t>(lane));
  __syncthreads();
  uint32_t* counts = warp_counts + static_cast<int64_t>(warp_of_thread()) * E;
#pragma unroll 1
  for (uint32_t base = 0; base < share.num_routes; base += 32) {
    const uint32_t i = base + static_cast<uint32_t>(lane);
    const ReadRoute<Id> read = next;
    next = read_route<Id>(args, share, i + 32);
    const int32_t expert = read.id >= 0 && read.id < E ? static_cast<int32_t>(read.id) : -1;
    const uint32_t same = __match_any_sync(~0u, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    const uint32_t seen = expert >= 0 ? counts[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) counts[expert] = seen + static_cast<uint32_t>(__popc(same));
    __syncwarp();
    if (i >= share.num_routes) continue;
    const int64_t route = share.first_route + i;
    note(i, RouteTarget{expert, static_cast<int32_t>(seen) + before});
    args.plan.weights[route] = expert >= 0 ? read.weight : 0.0f;
    const bool must_compare = expert >= 0 && !args.routing.ids_are_distinct;
    const uint32_t slot = i % static_cast<uint32_t>(args.shape.K);
    check_route(args, route, read, must_compare && is_repeated(args, route, slot, read.id, same));
  }
}

// Turns the counts of a block's warps to expert e into sums over earlier warps, each passed to
// put(warp, sum); returns the total.
template <typename Put>
__device__ uint32_t sum_warps(const uint32_t* warp_counts, int32_t E, int e, const Put& put) {
  constexpr int kInFlight = 8;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  uint32_t sum = 0;
#pragma unroll 1
  for (int w = 0; w < num_warps; w += kInFlight) {
    uint32_t part[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      part[i] = w + i < num_warps ? warp_counts[(w + i) * E + e] : 0;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (w + i < num_warps) put(w + i, sum);
      sum += part[i];
    }
  }
  return sum;
}

// The target of a route. owner: rank of its expert; base: row there of this rank's first route to
// that expert, or -1; number: index of the route among this rank's routes to the expert.
__device__ RouteTarget target_at(const PlanArgs& args, int32_t owner, int32_t base,
                                 int32_t number) {
  if (base < 0 || number >= args.shape.capacity) return {-1, -1};
  return {owner, base + number};
}

__device__ void place_route(const PlanArgs& args, int64_t route, const RouteTarget& target) {
  args.plan.targets[route] = target;
  if (target.rank < 0) args.plan.weights[route] = 0.0f;
}

// Reads ahead what the kernel will need, before the previous one has ended.
template <typename Id>
__device__ void prefetch_inputs(const PlanArgs& args) {
  constexpr int kLine = 128;
  const auto prefetch = [](const void* from, int64_t num_bytes, int64_t first) {
    if (first < num_bytes) prefetch_line(static_cast<const std::byte*>(from) + first);
  };
  const WarpShare share = WarpShare::of(args, global_warp());
  const int64_t first = int64_t{lane_of_thread()} * kLine;
  prefetch(static_cast<const Id*>(args.routing.expert_ids) + share.first_route,
           share.num_routes * static_cast<int64_t>(sizeof(Id)), first);
  prefetch(args.routing.weights + share.first_route,
           share.num_routes * static_cast<int64_t>(sizeof(float)), first);
  const int64_t table_bytes = args.shape.E * static_cast<int64_t>(sizeof(int32_t));
  const int64_t here = static_cast<int64_t>(threadIdx.x) * kLine;
  prefetch(args.shape.owner, table_bytes, here);
  prefetch(args.shape.by_owner, table_bytes, here);
  if (threadIdx.x != 0) return;
  prefetch_line(args.shape.owner_offsets);
  prefetch_line(args.signals.state);
}

// Counts a block's routes and leaves the counts in global memory.
template <typename Id>
__device__ void count_block(const PlanArgs& args, uint32_t* warp_counts) {
  const int32_t E = args.shape.E;
  const WarpShare share = WarpShare::of(args, global_warp());
  count_routes<Id>(args, share, warp_counts, [&](uint32_t i, const RouteTarget& counted) {
    args.plan.targets[share.first_route + i] = counted;
  });
  __syncthreads();
  const int64_t first_warp = global_warp() - warp_of_thread();
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < E; e += static_cast<int>(blockDim.x)) {
    const uint32_t total = sum_warps(warp_counts, E, e, [&](int warp, uint32_t sum) {
      args.scratch.warp_sums[(first_warp + warp) * E + e] = static_cast<int32_t>(sum);
    });
    args.scratch.block_sums[static_cast<int64_t>(blockIdx.x) * E + e] = static_cast<int32_t>(total);
  }
}

// A block counts a range of tokens; the last exchanges counts.
template <typename Id, bool kQueued>
__global__ void __launch_bounds__(kMostPlanWarps * 32, 2)
    count_kernel(const __grid_constant__ PlanArgs args) {
  extern __shared__ int64_t memory[];
  prefetch_inputs<Id>(args);
  wait_for_previous_kernel();
  const SignalStart start = read_start(args.signals);
  count_block<Id>(args, reinterpret_cast<uint32_t*>(memory));
  if (!last_block(args.signals, /*writes_to_peers=*/false)) return;
  const SegmentMemory segments = SegmentMemory::carve(memory, args.shape.E);
  send_counts<kQueued>(args, start, segments, [&](int e) { return sum_blocks(args, e); });
  read_tables(args, segments);
  finish_exchange<kQueued>(args, start, segments);
}

// A thread places a route.
__global__ void __launch_bounds__(kPlaceThreads)
    place_kernel(const __grid_constant__ PlanArgs args) {
  allow_next_kernel();  // all counts have arrived before this kernel starts: nobody needs its room
  wait_for_previous_kernel();
  const int64_t route = static_cast<int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x;
  if (route >= args.routing.T * args.shape.K) return;
  const RouteTarget counted = args.plan.targets[route];
  const int32_t e = counted.rank;
  if (e < 0) return place_route(args, route, {-1, -1});
  const int64_t warp = route / (args.shares.warp_tokens * args.shape.K);
  const int64_t block = warp / args.shares.num_warps;
  const int32_t number = args.scratch.block_sums[block * args.shape.E + e] +
                         args.scratch.warp_sums[warp * args.shape.E + e] + counted.row;
  place_route(args, route,
              target_at(args, args.shape.owner[e], args.scratch.route_base[e], number));
}

// One block does everything.
template <typename Id, bool kQueued>
__global__ void __launch_bounds__(kMostPlanWarps * 32, 1)
    small_plan_kernel(const __grid_constant__ PlanArgs args) {
  extern __shared__ int64_t memory[];
  const int32_t E = args.shape.E;
  const SegmentMemory segments = SegmentMemory::carve(memory, E);
  auto* routes = reinterpret_cast<RouteTarget*>(memory + segment_bytes(E) / sizeof(int64_t));
  auto* warp_counts = reinterpret_cast<uint32_t*>(routes + args.routing.T * args.shape.K);
  const WarpShare share = WarpShare::of(args, global_warp());
  RouteTarget* own_routes = routes + share.first_route;
  prefetch_inputs<Id>(args);
  read_tables(args, segments);
  wait_for_previous_kernel();
  const SignalStart start = read_start(args.signals);
  count_routes<Id>(args, share, warp_counts,
                   [&](uint32_t i, const RouteTarget& counted) { own_routes[i] = counted; });
  __syncthreads();
  send_counts<kQueued>(args, start, segments, [&](int e) {
    return int64_t{sum_warps(warp_counts, E, e, [&](int warp, uint32_t sum) {
      warp_counts[static_cast<int64_t>(warp) * E + e] = sum;
    })};
  });
  finish_exchange<kQueued>(args, start, segments);
  const uint32_t* earlier = warp_counts + static_cast<int64_t>(warp_of_thread()) * E;
#pragma unroll 1
  for (uint32_t i = lane_of_thread(); i < share.num_routes; i += 32) {
    const RouteTarget counted = own_routes[i];
    const int32_t e = counted.rank;
    RouteTarget target{-1, -1};
    if (e >= 0) {
      const int32_t number = static_cast<int32_t>(earlier[e]) + counted.row;
      target = target_at(args, segments.owner[e], segments.base[e], number);
    }
    place_route(args, share.first_route + i, target);
  }
}

// Shared memory of the block of a small plan.
int64_t small_plan_bytes(const PlanShares& shares, int64_t num_routes, int64_t E) {
  return segment_bytes(E) + num_routes * static_cast<int64_t>(sizeof(RouteTarget)) +
         shares.num_warps * E * static_cast<int64_t>(sizeof(uint32_t));
}

}  // namespace

PlanShares plan_shares(int64_t T, int32_t K, int32_t E, int num_sharing) {
  const int64_t fitting = kCountBytes / (E * static_cast<int64_t>(sizeof(uint32_t)));
  PlanShares shares{};
  shares.num_warps = kMostPlanWarps;
  while (shares.num_warps > 1 && shares.num_warps > fitting) shares.num_warps /= 2;
  shares.num_blocks = 1;
  if (T * K > kMostRoutesOfOne) {
    const int64_t most = std::max(2 * num_sms(current_device()) / num_sharing, 1);  // at once
    const int64_t wanted = (T * K + kRoutesPerBlock - 1) / kRoutesPerBlock;
    shares.num_blocks = static_cast<int32_t>(std::min({wanted, most, kMostBlocks}));
  } else if (E <= kMostExpertsOfOne) {
    const int64_t memory = shared_memory_per_block(current_device()) - kPlanFixedBytes;
    shares.is_small = small_plan_bytes(shares, T * K, E) <= memory;
  }
  const int64_t all_warps = int64_t{shares.num_blocks} * shares.num_warps;
  shares.warp_tokens = std::max<int64_t>((T + all_warps - 1) / all_warps, 1);
  return shares;
}

int64_t plan_words(int64_t E) {
  return kHeaderWords + E;
}

namespace {

using PlanKernel = void (*)(PlanArgs);

template <bool kQueued>
PlanKernel kernel_for(const PlanArgs& args) {
  if (args.shares.is_small) {
    return args.routing.ids_are_64_bit ? small_plan_kernel<int64_t, kQueued>
                                       : small_plan_kernel<int32_t, kQueued>;
  }
  return args.routing.ids_are_64_bit ? count_kernel<int64_t, kQueued>
                                     : count_kernel<int32_t, kQueued>;
}

template <bool kQueued>
void load_kind(int64_t shared_memory) {
  load_kernels(count_kernel<int32_t, kQueued>, count_kernel<int64_t, kQueued>,
               small_plan_kernel<int32_t, kQueued>, small_plan_kernel<int64_t, kQueued>);
  const int64_t most = shared_memory - kPlanFixedBytes;
  const auto bytes = static_cast<int>(std::min(most, segment_bytes(kMaxExperts)));
  for (auto* kernel : {count_kernel<int32_t, kQueued>, count_kernel<int64_t, kQueued>,
                       small_plan_kernel<int32_t, kQueued>, small_plan_kernel<int64_t, kQueued>}) {
    cudaFuncAttributes attributes{};
    CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
    CROSSDOCK_ASSERT(static_cast<int64_t>(attributes.sharedSizeBytes) <= kPlanFixedBytes);
    CROSSDOCK_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }
}

}  // namespace

void load_plan(int64_t shared_memory) {
  load_kernels(place_kernel);
  load_kind<false>(shared_memory);
  load_kind<true>(shared_memory);
}

void launch_plan(const PlanArgs& args, cudaStream_t stream) {
  const int32_t E = args.shape.E;
  const PlanShares& shares = args.shares;
  CROSSDOCK_ASSERT(E <= kMaxExperts);
  CROSSDOCK_ASSERT(args.signals.max_words >= plan_words(E));
  const int64_t num_routes = args.routing.T * args.shape.K;
  const int64_t count_bytes =
      int64_t{shares.num_warps} * E * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t bytes = shares.is_small ? small_plan_bytes(shares, num_routes, E)
                                        : std::max(count_bytes, segment_bytes(E));
  const LaunchShape shape{.blocks = static_cast<unsigned>(shares.num_blocks),
                          .threads = static_cast<unsigned>(shares.num_warps) * 32,
                          .shared_bytes = static_cast<size_t>(bytes)};
  const PlanKernel kernel =
      args.call.number != 0 ? kernel_for<true>(args) : kernel_for<false>(args);
  // Blocks that start early must leave room for kernels that the previous one may be waiting for.
  if (shares.num_blocks * args.num_sharing <= num_sms(current_device()) / 2) {
    launch_early(kernel, shape, stream, args);
  } else {
    kernel<<<shape.blocks, shape.threads, shape.shared_bytes, stream>>>(args);
    CROSSDOCK_CUDA(cudaGetLastError());
  }
  if (shares.is_small) return;
  const auto blocks = static_cast<unsigned>((num_routes + kPlaceThreads - 1) / kPlaceThreads);
  if (blocks > 0) launch_early(place_kernel, blocks, kPlaceThreads, stream, args);
}

}  // namespace crossdock::cuda
