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
// row. Nothing depends on the order in which blocks run.

namespace crossdock::cuda {
namespace {

constexpr int kRoutesPerBlock = 2048;
constexpr int kMostBlocks = 64;
constexpr int64_t kCountBytes = 40 << 10;  // shared memory for the counts of a block's warps

struct TokenRange {
  int64_t begin;
  int64_t end;
};

__device__ TokenRange split(int64_t begin, int64_t end, int parts, int part) {
  const int64_t each = (end - begin + parts - 1) / parts;
  const int64_t first = begin + each * part;
  return {min(first, end), min(first + each, end)};
}

// The expert of a route, or -1; records the lowest bad route of this rank.
template <typename Id>
__device__ int32_t read_route(const PlanArgs& args, int64_t route) {
  const DeviceRouting& routing = args.routing;
  const auto* ids = static_cast<const Id*>(routing.expert_ids);
  const int64_t token = route / args.shape.K;
  const Id id = ids[route];
  const float weight = routing.weights[route];
  if (id == -1 || (routing.mask != nullptr && routing.mask[token])) return -1;
  FaultCode fault = FaultCode::kNone;
  if (args.shape.reject_nonfinite && !isfinite(weight)) fault = FaultCode::kWeightNotFinite;
  const int64_t first = routing.ids_are_distinct ? route : token * args.shape.K;
  for (int64_t earlier = first; earlier < route; ++earlier) {
    if (ids[earlier] == id) fault = FaultCode::kExpertRepeated;
  }
  if (id < 0 || id >= args.shape.E) fault = FaultCode::kExpertRange;
  if (fault == FaultCode::kNone) return static_cast<int32_t>(id);
  atomicMin(reinterpret_cast<unsigned long long*>(&args.signals.state->bad_route),
            static_cast<unsigned long long>(route) << 8 | static_cast<uint32_t>(fault));
  return -1;
}

// A warp counts its tokens, 32 routes at a time; lanes with the same expert are ranked by lane.
// Leaves {expert, number of earlier routes of this block to it} in plan.targets.
template <typename Id>
__device__ void count_routes(const PlanArgs& args, uint32_t* warp_counts) {
  const int32_t E = args.shape.E;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < num_warps * E;
       i += static_cast<int>(blockDim.x)) {
    warp_counts[i] = 0;
  }
  __syncthreads();
  const TokenRange block =
      split(0, args.routing.T, static_cast<int>(gridDim.x), static_cast<int>(blockIdx.x));
  const TokenRange range = split(block.begin, block.end, num_warps, warp);
  const int64_t end = range.end * args.shape.K;
  uint32_t* counts = warp_counts + static_cast<int64_t>(warp) * E;
  for (int64_t base = range.begin * args.shape.K; base < end; base += 32) {
    const int64_t route = base + lane;
    const int32_t expert = route < end ? read_route<Id>(args, route) : -1;
    const uint32_t same = __match_any_sync(~0u, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    const uint32_t seen = expert >= 0 ? counts[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) counts[expert] = seen + static_cast<uint32_t>(__popc(same));
    __syncwarp();
    if (route < end) args.plan.targets[route] = {expert, static_cast<int32_t>(seen) + before};
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
        if (w + i < num_warps) warp_counts[(w + i) * E + e] = sum;
        sum += part[i];
      }
    }
    args.block_counts[static_cast<int64_t>(blockIdx.x) * E + e] = static_cast<int32_t>(sum);
  }
  __syncthreads();
  for (int64_t route = range.begin * args.shape.K + lane; route < end; route += 32) {
    RouteTarget target = args.plan.targets[route];
    if (target.rank >= 0) target.row += static_cast<int32_t>(counts[target.rank]);
    args.plan.targets[route] = target;
  }
}

// A thread turns {expert, place in its block} into the route's target.
__device__ void place_routes(const PlanArgs& args, int block, const TokenRange& tokens) {
  const int32_t* sums = args.block_counts + static_cast<int64_t>(block) * args.shape.E;
  const int64_t end = tokens.end * args.shape.K;
  for (int64_t route = tokens.begin * args.shape.K + threadIdx.x; route < end;
       route += blockDim.x) {
    const RouteTarget counted = args.plan.targets[route];
    const int32_t e = counted.rank;
    RouteTarget target{-1, -1};
    if (e >= 0) {
      const int32_t base = args.route_base[e];
      const int32_t place = sums[e] + counted.row;
      if (base >= 0 && place < args.shape.capacity) target = {args.shape.owner[e], base + place};
    }
    args.plan.targets[route] = target;
    args.plan.weights[route] = target.rank >= 0 ? args.routing.weights[route] : 0.0f;
  }
}

// A block counts a range of tokens; the last exchanges counts; a sole block also places routes.
template <typename Id>
__global__ void __launch_bounds__(kMostPlanWarps * 32)
    count_kernel(const __grid_constant__ PlanArgs args) {
  extern __shared__ int64_t memory[];
  count_routes<Id>(args, reinterpret_cast<uint32_t*>(memory));
  if (gridDim.x > 1 && !last_block(args.signals)) return;
  __syncthreads();
  exchange_counts(args, SegmentMemory::carve(memory, args.shape.E));
  allow_next_kernel();
  if (gridDim.x == 1) place_routes(args, 0, {0, args.routing.T});
}

// A block places the routes of the tokens that the block of the same number counted.
__global__ void __launch_bounds__(kMostPlanWarps * 32)
    place_kernel(const __grid_constant__ PlanArgs args) {
  wait_for_previous_kernel();
  const int block = static_cast<int>(blockIdx.x);
  place_routes(args, block, split(0, args.routing.T, static_cast<int>(gridDim.x), block));
}

}  // namespace

int plan_blocks(int64_t T, int32_t K) {
  return static_cast<int>(
      std::clamp<int64_t>((T * K + kRoutesPerBlock - 1) / kRoutesPerBlock, 1, kMostBlocks));
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
  const int64_t fitting = kCountBytes / (E * static_cast<int64_t>(sizeof(uint32_t)));
  int num_warps = kMostPlanWarps;
  while (num_warps > 1 && num_warps > fitting) num_warps /= 2;
  const int64_t bytes =
      std::max<int64_t>(num_warps * E * static_cast<int64_t>(sizeof(uint32_t)), segment_bytes(E));
  const int num_blocks = plan_blocks(args.routing.T, args.shape.K);
  auto* kernel = args.routing.ids_are_64_bit ? count_kernel<int64_t> : count_kernel<int32_t>;
  kernel<<<num_blocks, num_warps * 32, static_cast<size_t>(bytes), stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
  if (num_blocks == 1) return;
  launch_early(place_kernel, num_blocks, kMostPlanWarps * 32, stream, args);
}

}  // namespace crossdock::cuda
