#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "router/cuda/balance_table.cuh"
#include "router/cuda/kernels.hpp"
#include "router/cuda/score_row.cuh"
#include "router/cuda/split_product.cuh"

namespace crossdock::router {
namespace {

template <int kPer>
constexpr int kGradWarps = kPer <= 16 ? 8 : 4;  // as many as shared memory has rows for
constexpr int kGradBlocksPerSm = 4;

// Whether rows of this size may be wanted as parts.
template <int kPer>
constexpr bool kHasParts = 32 * kPer <= kMostExpertsInParts;

// What the gradient of a token is computed from. Lane k has slot k.
template <int kPer>
struct TokenInput {
  float logits[kPer];
  int32_t sequence;
  int32_t id;  // of the expert; -1 without a route
  float grad;  // of the weight

  __device__ void read(const GradLogitsArgs& args, int64_t token) {
    const ScoreRules& rules = args.rules;
    sequence = args.sequences[token];
    read_row(args.logits, token, rules.E, logits);
    id = -1;
    grad = 0.0f;
    if (args.grad_weights == nullptr || lane_id() >= rules.K) return;
    const int64_t route = token * rules.K + lane_id();
    id = args.expert_ids[route];
    grad = args.grad_weights[route];
  }

  /// Once the values are there.
  __device__ void check(const ScoreRules& rules) {
    if (id >= 0 && id < rules.E) return;
    id = -1;
    grad = 0.0f;
  }
};

// Adds the value of each lane to the expert `id` of that lane, if it is not negative. Caller's
// routes may name an expert twice: then slots are added in order.
template <int kPer>
__device__ void add_to_experts(const ScoreRules& rules, int32_t id, float value, float* scratch,
                               float (&row)[kPer]) {
  constexpr float kZeros[kPer] = {};
  write_whole_row(kZeros, scratch);
  __syncwarp();
  const auto mark = static_cast<float>(lane_id() + 1);
  if (id >= 0) scratch[id] = mark;
  __syncwarp();
  const bool is_alone = id < 0 || scratch[id] == mark;
  if (__all_sync(~0u, is_alone)) {
    if (id >= 0) scratch[id] = value;
    __syncwarp();
    float added[kPer];
    read_whole_row(scratch, added);
#pragma unroll
    for (int i = 0; i < kPer; ++i) row[i] += added[i];
  } else {
    for (int k = 0; k < rules.K; ++k) {
      const int32_t expert = __shfl_sync(~0u, id, k);
      const float of_slot = __shfl_sync(~0u, value, k);
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (element_of<kPer>(i) == expert) row[i] += of_slot;
      }
    }
  }
  __syncwarp();  // before the scratch is used again
}

// grad_scores += the gradient through the weights. `scratch` is a row of this warp.
template <int kPer>
__device__ void add_weight_gradient(const ScoreRules& rules, const TokenInput<kPer>& token,
                                    const float (&scores)[kPer], float* scratch,
                                    float (&grad_scores)[kPer]) {
  const bool has_route = token.id >= 0;
  const float grad = token.grad;
  const float score = score_of_slot(scores, token.id, scratch);
  const SlotWeights slot = slot_weights(rules, has_route, score);
  const float inner = warp_sum(grad * slot.weight);
  float slope = grad;
  if (rules.score == Score::kSoftmaxAfterTopK) {
    slope = slot.weight * (grad - inner);
  } else if (rules.normalises) {
    slope = (grad - inner) / slot.divisor;
  }
  add_to_experts(rules, token.id, slope * rules.scaling, scratch, grad_scores);
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
    const int32_t e = element_of<kPer>(i);
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
    if (element_of<kPer>(i) < args.rules.E) grad_scores[i] += (grad_shares[i] - inner) / sum;
  }
}

template <int kPer>
__device__ void grad_of_token(const GradLogitsArgs& args, const BalanceTable& table,
                              const TokenInput<kPer>& token, float* scratch, float (&grad)[kPer]) {
  const ScoreRules& rules = args.rules;
  if (token.sequence < 0) return;
  const auto& logits = token.logits;
  float scores[kPer];
  float grad_scores[kPer] = {};
  device_scores(rules.score, logits, rules.E, scores);
  if (args.grad_weights != nullptr) {
    add_weight_gradient(rules, token, scores, scratch, grad_scores);
  }
  if (args.balance.has_aux()) {
    add_aux_gradient(args, table, token.sequence, logits, scores, grad_scores, grad);
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

// The parts of some neighbours, one part of which is stored at once. Those outside the row are in
// the space between rows, or not stored.
template <int kPer>
__device__ void store_parts(const GradLogitsArgs& args, int64_t token, const float (&grad)[kPer]) {
  struct alignas(2 * kPer) Part {
    uint16_t bits[kPer];
  };
  Part parts[kNumParts];
#pragma unroll
  for (int i = 0; i < kPer; i += 2) {
    const SplitPair split(grad[i], i + 1 < kPer ? grad[i + 1] : 0.0f);
#pragma unroll
    for (int part = 0; part < kNumParts; ++part) {
      parts[part].bits[i] = static_cast<uint16_t>(split.parts[part]);
      if (i + 1 < kPer) parts[part].bits[i + 1] = static_cast<uint16_t>(split.parts[part] >> 16);
    }
  }
  if (element_of<kPer>(0) >= args.rules.E) return;
  BF16* to = args.parts.values + token * args.parts.pitch + element_of<kPer>(0);
#pragma unroll
  for (int part = 0; part < kNumParts; ++part) {
    *reinterpret_cast<Part*>(to) = parts[part];
    to += args.T * args.parts.pitch;
  }
}

template <int kPer>
__device__ void store_row(const GradLogitsArgs& args, int64_t token, const float (&grad)[kPer]) {
  const int32_t E = args.rules.E;
  if (args.grad_logits != nullptr) {
    float* const to = args.grad_logits + token * E;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (element_of<kPer>(i) < E) to[element_of<kPer>(i)] = grad[i];
    }
  }
  if constexpr (kHasParts<kPer>) {
    if (args.parts.values != nullptr) store_parts(args, token, grad);
  }
}

// Whether a call is one of the usual ones.
bool is_plain(const GradLogitsArgs& args) {
  return args.grad_weights != nullptr && args.grad_logits == nullptr &&
         args.parts.values != nullptr && !args.balance.has_aux() && args.balance.z_coeff == 0.0 &&
         is_whole_row(args.rules.E);
}

/// A kernel for a score, for calls that are plain; as in choose.cu.
template <int kRowSize, Score kRowScore>
struct PlainGrad {
  static constexpr int kPer = kRowSize;

  static __device__ GradLogitsArgs known(GradLogitsArgs args) {
    args.rules.score = kRowScore;
    args.rules.E = 32 * kPer;
    args.balance = {};
    args.grad_logits = nullptr;
    return args;
  }
};

/// A kernel for all calls.
template <int kRowSize>
struct AnyGrad {
  static constexpr int kPer = kRowSize;
  static __device__ const GradLogitsArgs& known(const GradLogitsArgs& args) { return args; }
};

// A warp takes tokens in turn, and reads one ahead.
template <typename Kind>
__global__ void __launch_bounds__(kGradWarps<Kind::kPer> * 32)
    grad_logits_kernel(const __grid_constant__ GradLogitsArgs given) {
  constexpr int kPer = Kind::kPer;
  constexpr int kWarps = kGradWarps<kPer>;
  __shared__ BalanceTable table;
  __shared__ __align__(16) float scratch[kWarps][32 * kPer];
  const GradLogitsArgs& args = Kind::known(given);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  TokenInput<kPer> next;
  cuda::wait_for_previous_kernel();
  cuda::allow_next_kernel();  // not earlier: see hopper/gradients.cu
  if (first < args.T) next.read(args, first);
  if (args.balance.has_aux() || args.balance.z_coeff != 0.0) {
    fill_balance_table(args.balance, args.rules, table);
  }
  for (int64_t token = first; token < args.T; token += stride) {
    TokenInput<kPer> input = next;
    if (token + stride < args.T) next.read(args, token + stride);
    input.check(args.rules);
    float grad[kPer] = {};
    grad_of_token(args, table, input, scratch[warp], grad);
    store_row(args, token, grad);
  }
}

template <typename Kind>
void launch(const GradLogitsArgs& args, cudaStream_t stream) {
  constexpr int kWarps = kGradWarps<Kind::kPer>;
  const int64_t most_blocks = int64_t{cuda::num_sms(cuda::current_device())} * kGradBlocksPerSm;
  const auto blocks = static_cast<unsigned>(std::min((args.T + kWarps - 1) / kWarps, most_blocks));
  cuda::launch_early(grad_logits_kernel<Kind>, blocks, kWarps * 32, stream, args);
}

template <int kPer>
void load_row_size() {
  cuda::load_kernels(grad_logits_kernel<AnyGrad<kPer>>);
  if constexpr (kHasParts<kPer>) {
    cuda::load_kernels(grad_logits_kernel<PlainGrad<kPer, Score::kSoftmax>>,
                       grad_logits_kernel<PlainGrad<kPer, Score::kSoftmaxAfterTopK>>,
                       grad_logits_kernel<PlainGrad<kPer, Score::kSigmoid>>,
                       grad_logits_kernel<PlainGrad<kPer, Score::kSqrtSoftplus>>);
  }
}

}  // namespace

void load_grad_logits() {
  load_row_size<1>();
  load_row_size<2>();
  load_row_size<4>();
  load_row_size<8>();
  load_row_size<16>();
  load_row_size<32>();
}

void launch_grad_logits(const GradLogitsArgs& args, cudaStream_t stream) {
  if (args.T == 0) return;
  with_row_size(args.rules.E, [&](auto size) {
    if constexpr (kHasParts<size.value>) {
      if (is_plain(args)) {
        return with_score(args.rules.score, [&](auto score) {
          launch<PlainGrad<size.value, score.value>>(args, stream);
        });
      }
    }
    launch<AnyGrad<size.value>>(args, stream);
  });
}

}  // namespace crossdock::router
