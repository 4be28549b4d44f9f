#include <algorithm>

#include "core/cuda/check.hpp"
#include "core/cuda/launch.hpp"
#include "dispatch/cuda/kernels/gather_routes.hpp"

namespace crossdock::cuda {
namespace {

constexpr int kThreads = 256;

// A thread takes routes in turn.
__global__ void gather_routes_kernel(const __grid_constant__ GatherRoutesArgs args) {
  const bool has_peers = !is_poisoned(args.signals);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t route = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       route < args.num_routes; route += stride) {
    const RouteTarget target = args.targets[route];
    const bool has_row = target.rank >= 0 && has_peers;
    args.routes[route] = has_row ? args.rows.of(target.rank)[target.row] : 0.0f;
  }
  if (last_block(args.signals)) peer_barrier(args.signals, Operation::kRouteValues);
}

}  // namespace

void load_gather_routes() {
  load_kernels(gather_routes_kernel);
}

void launch_gather_routes(const GatherRoutesArgs& args, cudaStream_t stream) {
  const int64_t wanted = (args.num_routes + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, 256));
  gather_routes_kernel<<<blocks, kThreads, 0, stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::cuda
