#include <algorithm>

#include "core/cuda/check.hpp"
#include "core/cuda/load_kernels.hpp"
#include "dispatch/cuda/kernels/route_values.hpp"

namespace crossdock::cuda {
namespace {

constexpr int kThreads = 256;

// A thread takes routes in turn.
template <bool kScatter>
__global__ void route_values_kernel(const __grid_constant__ RouteValuesArgs args) {
  const bool has_peers = !is_poisoned(args.signals);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t route = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       route < args.num_routes; route += stride) {
    const RouteTarget target = args.targets[route];
    const bool has_row = target.rank >= 0 && has_peers;
    if (kScatter && has_row) {
      args.rows[target.rank][target.row] = args.routes[route];
    } else if (!kScatter) {
      args.routes[route] = has_row ? args.rows[target.rank][target.row] : 0.0f;
    }
  }
  if (last_block(args.signals)) peer_barrier(args.signals, Operation::kRouteValues);
}

template <bool kScatter>
void launch(const RouteValuesArgs& args, cudaStream_t stream) {
  const int64_t wanted = (args.num_routes + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, 256));
  route_values_kernel<kScatter><<<blocks, kThreads, 0, stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace

void load_route_values() {
  load_kernels(route_values_kernel<false>, route_values_kernel<true>);
}

void launch_scatter_routes(const RouteValuesArgs& args, cudaStream_t stream) {
  launch<true>(args, stream);
}

void launch_gather_routes(const RouteValuesArgs& args, cudaStream_t stream) {
  launch<false>(args, stream);
}

}  // namespace crossdock::cuda
