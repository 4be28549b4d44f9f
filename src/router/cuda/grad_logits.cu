#include <algorithm>

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/load_kernels.hpp"
#include "router/cuda/balance_table.cuh"
#include "router/cuda/grad_logits.hpp"
#include "router/cuda/score_row.cuh"

namespace crossdock::router {
namespace {

constexpr int kGradWarps = 8;
constexpr int kGradBlocksPerSm = 4;

// grad_scores += the gradient through the weights; lane k has slot k.
template <int kPer>
__device__ void add_weight_gradient(const GradLogitsArgs& args, int64_t token,
                                    const float (&scores)[kPer], float (&grad_scores)[kPer]) {
  const ScoreRules& rules = args.rules;
  const int64_t route = token * rules.K + lane_id();
  const bool is_slot = lane_id() < rules.K;
  const int32_t id = is_slot ? args.expert_ids[route] : -1;
  const bool has_route = id >= 0 && id < rules.E;
  const float grad = has_route ? args.grad_weights[route] : 0.0f;
  float score = 0.0f;
  for (int k = 0; k < rules.K; ++k) {
    const float of_slot = value_at(scores, __shfl_sync(~0u, id, k));
    if (lane_id() == k) score = of_slot;
  }
  const SlotWeights slot = slot_weights(rules, has_route, score);
  float inner = 0.0f;
  for (int k = 0; k < rules.K; ++k) inner += __shfl_sync(~0u, grad * slot.weight, k);
  float slope = grad;
  if (rules.score == Score::kSoftmaxAfterTopK) {
    slope = slot.weight * (grad - inner);
  } else if (rules.normalises) {
    slope = (grad - inner) / slot.divisor;
  }
  slope *= rules.scaling;
  for (int k = 0; k < rules.K; ++k) {
    const int32_t expert = __shfl_sync(~0u, has_route ? id : -1, k);
    const float of_slot = __shfl_sync(~0u, slope, k);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (element_of(i) == expert) grad_scores[i] += of_slot;
    }
  }
}

// The gradient of the auxiliary losses by the shares.
template <int kPer>
__device__ void grad_of_shares(const GradLogitsArgs& args, const BalanceTable& table,
                               int32_t sequence, float (&grad_shares)[kPer]) {
  const BalanceArgs& balance = args.balance;
  const int32_t E = args.rules.E;
  const float batch = args.grad_losses * table.batch_factor;
  const float global = args.grad_losses * table.global_factor;
  const bool by_sequence = balance.sequence.coeff != 0.0;
  const float of_sequence =
      by_sequence ? args.grad_losses * sequence_factor(balance, args.rules, table, sequence) : 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t e = element_of(i);
    grad_shares[i] = 0.0f;
    if (e >= E) continue;
    if (balance.batch.coeff != 0.0) {
      grad_shares[i] = batch * static_cast<float>(table.batch_routes[e]);
    }
    if (by_sequence) {
      const int64_t routes = balance.sequence.routes[static_cast<int64_t>(sequence) * E + e];
      grad_shares[i] += of_sequence * static_cast<float>(routes);
    }
    if (balance.global_batch.coeff != 0.0) {
      grad_shares[i] += global * static_cast<float>(table.global_routes[e]);
    }
  }
}

// Adds the gradient of the auxiliary losses: to grad_logits if the shares are a softmax, else to
// grad_scores.
template <int kPer>
__device__ void add_aux_gradient(const GradLogitsArgs& args, const BalanceTable& table,
                                 int32_t sequence, const float (&logits)[kPer],
                                 const float (&scores)[kPer], float (&grad_scores)[kPer],
                                 float (&grad_logits)[kPer]) {
  float shares[kPer];
  float grad_shares[kPer];
  const float sum = device_shares(args.rules.score, logits, scores, shares);
  grad_of_shares(args, table, sequence, grad_shares);
  if (shares_are_softmax(args.rules.score)) {
    return device_softmax_backward(shares, grad_shares, grad_logits);
  }
  const float inner = inner_product(grad_shares, shares);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (element_of(i) < args.rules.E) grad_scores[i] += (grad_shares[i] - inner) / sum;
  }
}

template <int kPer>
__device__ void grad_of_token(const GradLogitsArgs& args, const BalanceTable& table, int64_t token,
                              float (&grad)[kPer]) {
  const ScoreRules& rules = args.rules;
  const int32_t sequence = args.sequences[token];
  if (sequence < 0) return;
  float logits[kPer];
  float scores[kPer];
  float grad_scores[kPer] = {};
  read_row(args.logits + token * rules.E, rules.E, -INFINITY, logits);
  device_scores(rules.score, logits, rules.E, scores);
  if (args.grad_weights != nullptr) add_weight_gradient(args, token, scores, grad_scores);
  if (args.balance.has_aux()) {
    add_aux_gradient(args, table, sequence, logits, scores, grad_scores, grad);
  }
  device_scores_backward(rules.score, logits, scores, grad_scores, grad);
  if (args.balance.z_coeff != 0.0) {
    const float largest = largest_of(logits);
    const float sum = exponentials(logits, largest, scores);
    const float factor = args.grad_losses * 2.0f * table.z_factor * (largest + logf(sum));
#pragma unroll
    for (int i = 0; i < kPer; ++i) grad[i] += factor * (scores[i] / sum);
  }
}

// A warp takes tokens in turn.
template <int kPer>
__global__ void __launch_bounds__(kGradWarps * 32)
    grad_logits_kernel(const __grid_constant__ GradLogitsArgs args) {
  __shared__ BalanceTable table;
  fill_balance_table(args.balance, args.rules, table);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGradWarps + warp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kGradWarps;
  for (int64_t token = first; token < args.T; token += stride) {
    float grad[kPer] = {};
    grad_of_token(args, table, token, grad);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int32_t e = element_of(i);
      if (e < args.rules.E) args.grad_logits[token * args.rules.E + e] = grad[i];
    }
  }
}

}  // namespace

void load_grad_logits() {
  cuda::load_kernels(grad_logits_kernel<1>, grad_logits_kernel<2>, grad_logits_kernel<4>,
                     grad_logits_kernel<8>, grad_logits_kernel<16>, grad_logits_kernel<32>);
}

void launch_grad_logits(const GradLogitsArgs& args, cudaStream_t stream) {
  if (args.T == 0) return;
  const int64_t most_blocks = int64_t{cuda::num_sms(cuda::current_device())} * kGradBlocksPerSm;
  const auto blocks =
      static_cast<unsigned>(std::min((args.T + kGradWarps - 1) / kGradWarps, most_blocks));
  with_row_size(args.rules.E, [&](auto size) {
    grad_logits_kernel<decltype(size)::value><<<blocks, kGradWarps * 32, 0, stream>>>(args);
  });
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::router
