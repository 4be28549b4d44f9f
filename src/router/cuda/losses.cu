#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "router/cuda/balance_table.cuh"
#include "router/cuda/kernels.hpp"
#include "router/cuda/score_row.cuh"

namespace crossdock::router {
namespace {

constexpr int kLossWarps = 8;
constexpr int64_t kTokensPerBlock = 32;
constexpr int64_t kMostLossBlocks = 1024;  // then blocks take more tokens
constexpr int kTotalThreads = 256;

// The sums of some tokens, by loss: batch, sequence, global batch, z.
struct LossSums {
  double values[4];

  __device__ void clear() { values[0] = values[1] = values[2] = values[3] = 0.0; }
  __device__ void add(const LossSums& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] += other.values[i];
  }
};

// sum over e of shares[e] * routes[e], on all lanes.
template <int kPer, typename Count>
__device__ double weighted_routes(const float (&shares)[kPer], const Count* routes, int32_t E) {
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (element_of<kPer>(i) >= E) continue;
    sum += static_cast<double>(shares[i]) * static_cast<double>(routes[element_of<kPer>(i)]);
  }
  return warp_sum(sum);
}

template <int kPer>
__device__ LossSums losses_of_token(const LossArgs& args, const BalanceTable& table,
                                    int64_t token) {
  LossSums sums;
  sums.clear();
  const int32_t sequence = args.sequences[token];
  if (sequence < 0) return sums;
  const ScoreRules& rules = args.rules;
  const BalanceArgs& balance = args.balance;
  float logits[kPer];
  read_row(args.logits, token, rules.E, logits);
  if (balance.has_aux()) {
    float scores[kPer];
    float shares[kPer];
    device_scores(rules.score, logits, rules.E, scores);
    device_shares(rules.score, logits, scores, shares);
    if (balance.batch.coeff != 0.0) {
      sums.values[0] = weighted_routes(shares, table.batch_routes, rules.E) *
                       static_cast<double>(table.batch_factor);
    }
    if (balance.sequence.coeff != 0.0) {
      const int64_t* routes = balance.sequence.routes + static_cast<int64_t>(sequence) * rules.E;
      sums.values[1] = weighted_routes(shares, routes, rules.E) *
                       static_cast<double>(sequence_factor(balance, rules, table, sequence));
    }
    if (balance.global_batch.coeff != 0.0) {
      sums.values[2] = weighted_routes(shares, table.global_routes, rules.E) *
                       static_cast<double>(table.global_factor);
    }
  }
  if (balance.z_coeff != 0.0) {
    const auto lse = static_cast<double>(device_log_sum_exp(logits));
    sums.values[3] = static_cast<double>(table.z_factor) * lse * lse;
  }
  return sums;
}

// A block takes a range of tokens, its warps in turn.
template <int kPer>
__global__ void __launch_bounds__(kLossWarps * 32)
    losses_kernel(const __grid_constant__ LossArgs args) {
  __shared__ BalanceTable table;
  __shared__ LossSums warp_sums[kLossWarps];
  fill_balance_table(args.balance, args.rules, table);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t each = (args.T + gridDim.x - 1) / gridDim.x;
  const int64_t begin = each * blockIdx.x;
  const int64_t end = min(begin + each, args.T);
  LossSums own;
  own.clear();
  for (int64_t token = begin + warp; token < end; token += kLossWarps) {
    own.add(losses_of_token<kPer>(args, table, token));
  }
  if (lane_id() == 0) warp_sums[warp] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kLossWarps; ++i) own.add(warp_sums[i]);
  reinterpret_cast<LossSums*>(args.partial_sums)[blockIdx.x] = own;
}

// One block; a thread adds up the sums of some blocks, the first thread those of all threads.
__global__ void __launch_bounds__(kTotalThreads)
    total_losses_kernel(const LossSums* partial_sums, int64_t num_blocks, double* values) {
  __shared__ LossSums thread_sums[kTotalThreads];
  LossSums own;
  own.clear();
  for (int64_t block = threadIdx.x; block < num_blocks; block += kTotalThreads) {
    own.add(partial_sums[block]);
  }
  thread_sums[threadIdx.x] = own;
  __syncthreads();
  for (int distance = kTotalThreads / 2; distance > 0; distance /= 2) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < distance) thread_sums[thread].add(thread_sums[thread + distance]);
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const double* sums = thread_sums[0].values;
  values[0] = sums[0] + sums[1] + sums[2];
  values[1] = sums[3];
  for (int i = 0; i < 3; ++i) values[2 + i] = sums[i];
}

}  // namespace

int64_t loss_blocks(int64_t T) {
  return std::min((T + kTokensPerBlock - 1) / kTokensPerBlock, kMostLossBlocks);
}

void load_losses() {
  cuda::load_kernels(losses_kernel<1>, losses_kernel<2>, losses_kernel<4>, losses_kernel<8>,
                     losses_kernel<16>, losses_kernel<32>, total_losses_kernel);
}

void launch_losses(const LossArgs& args, cudaStream_t stream) {
  const bool is_zero = args.T == 0 || (!args.balance.has_aux() && args.balance.z_coeff == 0.0);
  const int64_t num_blocks = is_zero ? 0 : loss_blocks(args.T);
  if (num_blocks > 0) {
    with_row_size(args.rules.E, [&](auto size) {
      losses_kernel<decltype(size)::value>
          <<<static_cast<unsigned>(num_blocks), kLossWarps * 32, 0, stream>>>(args);
    });
    CROSSDOCK_CUDA(cudaGetLastError());
  }
  total_losses_kernel<<<1, kTotalThreads, 0, stream>>>(
      reinterpret_cast<const LossSums*>(args.partial_sums), num_blocks, args.values);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::router
