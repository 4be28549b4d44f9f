#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "router/cuda/kernels.hpp"

namespace crossdock::router {
namespace {

constexpr int kCountThreads = 256;

__global__ void __launch_bounds__(kCountThreads)
    sum_counts_kernel(const __grid_constant__ SumCountsArgs args) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCountThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCountThreads + threadIdx.x; i < args.count;
       i += stride) {
    args.sum[i] = args.a[i] + args.b[i];
  }
}

// A thread sums the routes of one expert, and one thread the tokens.
__global__ void __launch_bounds__(kCountThreads)
    sum_batches_kernel(const __grid_constant__ SumBatchesKernelArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kCountThreads + threadIdx.x;
  if (i > args.E) return;
  const int64_t B = args.num_sequences;
  const int64_t first = i < args.E ? i : B * args.E;
  const int64_t step = i < args.E ? args.E : 1;
  int64_t sum = 0;
  for (int64_t n = 0; n < args.num_batches; ++n) {
    const int64_t* counts = args.counts + n * B * (args.E + 1) + first;
    for (int64_t b = 0; b < B; ++b) sum += counts[b * step];
  }
  args.sum[i] = sum;
}

__device__ int64_t load_of(const UpdateBiasArgs& args, int64_t e) {
  int64_t load = 0;
  for (int64_t b = 0; b < args.num_sequences; ++b) load += args.routes[b * args.E + e];
  return load;
}

// rate * sign(mean - load) of an expert.
__device__ double step_of(const UpdateBiasArgs& args, int64_t e, int64_t total) {
  const int64_t lacking = total - load_of(args, e) * args.E;  // E * (mean - load)
  return lacking > 0 ? args.rate : lacking < 0 ? -args.rate : 0.0;
}

// One block; a thread takes experts in turn.
__global__ void __launch_bounds__(kCountThreads)
    update_bias_kernel(const __grid_constant__ UpdateBiasArgs args) {
  __shared__ unsigned long long total;
  __shared__ double mean;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int64_t e = threadIdx.x; e < args.E; e += kCountThreads) {
    own += static_cast<unsigned long long>(load_of(args, e));
  }
  atomicAdd(&total, own);
  __syncthreads();
  const auto all = static_cast<int64_t>(total);
  if (threadIdx.x == 0) {
    mean = 0.0;
    // In the order of the CPU, whose bits the mean has.
    for (int64_t e = 0; args.centred && e < args.E; ++e) mean += step_of(args, e, all);
    mean /= static_cast<double>(args.E);
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < args.E; e += kCountThreads) {
    double step = step_of(args, e, all);
    if (args.centred) step -= mean;
    args.bias[e] = static_cast<float>(static_cast<double>(args.bias[e]) + step);
  }
}

}  // namespace

void load_counts() {
  cuda::load_kernels(sum_batches_kernel, sum_counts_kernel, update_bias_kernel);
}

void launch_sum_counts(const SumCountsArgs& args, cudaStream_t stream) {
  if (args.count == 0) return;
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>((args.count + kCountThreads - 1) / kCountThreads, 1024));
  sum_counts_kernel<<<blocks, kCountThreads, 0, stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

void launch_sum_batches(const SumBatchesKernelArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(args.E / kCountThreads + 1);
  sum_batches_kernel<<<blocks, kCountThreads, 0, stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

void launch_update_bias(const UpdateBiasArgs& args, cudaStream_t stream) {
  if (args.E == 0) return;
  update_bias_kernel<<<1, kCountThreads, 0, stream>>>(args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::router
