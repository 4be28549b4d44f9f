#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "router/cuda/kernels.hpp"
#include "router/scores.hpp"

// router/scores.hpp for a warp: a row of E values, in registers. Lane l holds the kPer elements
// from l * kPer on. Sums over a row have a fixed order: within each lane, then across lanes.

namespace crossdock::router {

/// Calls work(std::integral_constant<int, kPer>) with enough elements per lane for E.
template <typename Work>
void with_row_size(int32_t E, const Work& work) {
  if (E <= 32) return work(std::integral_constant<int, 1>{});
  if (E <= 64) return work(std::integral_constant<int, 2>{});
  if (E <= 128) return work(std::integral_constant<int, 4>{});
  if (E <= 256) return work(std::integral_constant<int, 8>{});
  if (E <= 512) return work(std::integral_constant<int, 16>{});
  static_assert(kMaxDeviceExperts == 1024);
  work(std::integral_constant<int, 32>{});
}

/// Whether all lanes hold equally many elements.
inline bool is_whole_row(int32_t E) {
  return E >= 32 && (E & (E - 1)) == 0;
}

/// Calls work(std::integral_constant<Score, score>).
template <typename Work>
void with_score(Score score, const Work& work) {
  if (score == Score::kSoftmax) return work(std::integral_constant<Score, Score::kSoftmax>{});
  if (score == Score::kSoftmaxAfterTopK) {
    return work(std::integral_constant<Score, Score::kSoftmaxAfterTopK>{});
  }
  if (score == Score::kSigmoid) return work(std::integral_constant<Score, Score::kSigmoid>{});
  work(std::integral_constant<Score, Score::kSqrtSoftplus>{});
}

__device__ inline int lane_id() {
  return static_cast<int>(threadIdx.x) % 32;
}

/// The sum over the warp, the same on every lane.
template <typename T>
__device__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
}

/// An integer that compares as the float does, and back. NaN is larger or smaller than all numbers.
__device__ inline int32_t ordered_bits(int32_t bits) {
  return bits ^ (bits >> 31 & 0x7fffffff);
}

__device__ inline float warp_max(float value) {
  const int32_t largest = __reduce_max_sync(~0u, ordered_bits(__float_as_int(value)));
  return __int_as_float(ordered_bits(largest));
}

/// Element i of a row on this lane.
template <int kPer>
__device__ int element_of(int i) {
  return lane_id() * kPer + i;
}

/// Neighbours that are read and written at once.
template <int kPer>
struct alignas(kPer < 4 ? 4 * kPer : 16) RowVector {
  static constexpr int kCount = kPer < 4 ? kPer : 4;
  float values[kCount];
};

/// `from` has 32 * kPer values and is aligned to 16 bytes.
template <int kPer>
__device__ void read_whole_row(const float* from, float (&row)[kPer]) {
  using Vector = RowVector<kPer>;
#pragma unroll
  for (int i = 0; i < kPer; i += Vector::kCount) {
    const Vector vector = *reinterpret_cast<const Vector*>(from + element_of<kPer>(i));
#pragma unroll
    for (int j = 0; j < Vector::kCount; ++j) row[i + j] = vector.values[j];
  }
}

/// The other way.
template <int kPer>
__device__ void write_whole_row(const float (&row)[kPer], float* to) {
  using Vector = RowVector<kPer>;
#pragma unroll
  for (int i = 0; i < kPer; i += Vector::kCount) {
    Vector vector;
#pragma unroll
    for (int j = 0; j < Vector::kCount; ++j) vector.values[j] = row[i + j];
    *reinterpret_cast<Vector*>(to + element_of<kPer>(i)) = vector;
  }
}

/// Row `token` of a matrix that is aligned to 16 bytes.
template <int kPer>
__device__ void read_row(const float* rows, int64_t token, int32_t E, float (&row)[kPer]) {
  const float* const from = rows + token * E;
  if (E == 32 * kPer) return read_whole_row(from, row);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    row[i] = element_of<kPer>(i) < E ? from[element_of<kPer>(i)] : -INFINITY;
  }
}

template <int kPer>
__device__ float row_sum(const float (&row)[kPer]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) sum += row[i];
  return warp_sum(sum);
}

template <int kPer>
__device__ float inner_product(const float (&a)[kPer], const float (&b)[kPer]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) sum += a[i] * b[i];
  return warp_sum(sum);
}

/// The score of each lane's expert `id`; 0 if that is negative. `scratch` is a whole row of this
/// warp in shared memory.
template <int kPer>
__device__ float score_of_slot(const float (&scores)[kPer], int32_t id, float* scratch) {
  write_whole_row(scores, scratch);
  __syncwarp();
  const float score = id >= 0 ? scratch[id] : 0.0f;
  __syncwarp();  // before the scratch is used again
  return score;
}

template <int kPer>
__device__ float largest_of(const float (&logits)[kPer]) {
  float largest = logits[0];
#pragma unroll
  for (int i = 1; i < kPer; ++i) largest = fmaxf(largest, logits[i]);
  return warp_max(largest);
}

/// exp(logits - largest), and their sum. Logits outside the row are -infinity.
template <int kPer>
__device__ float exponentials(const float (&logits)[kPer], float largest, float (&out)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) out[i] = expf(logits[i] - largest);
  return row_sum(out);
}

template <int kPer>
__device__ void device_softmax(const float (&logits)[kPer], float (&out)[kPer]) {
  const float inverse = 1.0f / exponentials(logits, largest_of(logits), out);
#pragma unroll
  for (int i = 0; i < kPer; ++i) out[i] *= inverse;
}

template <int kPer>
__device__ float device_log_sum_exp(const float (&logits)[kPer]) {
  const float largest = largest_of(logits);
  float unused[kPer];
  return largest + logf(exponentials(logits, largest, unused));
}

__device__ inline float device_sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

/// scores_of: 0 outside the row, where logits are -infinity.
template <int kPer>
__device__ void device_scores(Score kind, const float (&logits)[kPer], int32_t E,
                              float (&scores)[kPer]) {
  if (kind == Score::kSoftmax) return device_softmax(logits, scores);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float logit = logits[i];
    float score = logit;
    if (kind == Score::kSigmoid) score = device_sigmoid(logit);
    if (kind == Score::kSqrtSoftplus) {
      score = sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
    }
    scores[i] = element_of<kPer>(i) < E ? score : 0.0f;
  }
}

/// grad_logits += p * (grad - <grad, p>) for p = softmax(logits).
template <int kPer>
__device__ void device_softmax_backward(const float (&p)[kPer], const float (&grad)[kPer],
                                        float (&grad_logits)[kPer]) {
  const float inner = inner_product(grad, p);
#pragma unroll
  for (int i = 0; i < kPer; ++i) grad_logits[i] += p[i] * (grad[i] - inner);
}

/// scores_backward: grad_logits += the gradient through device_scores.
template <int kPer>
__device__ void device_scores_backward(Score kind, const float (&logits)[kPer],
                                       const float (&scores)[kPer],
                                       const float (&grad_scores)[kPer],
                                       float (&grad_logits)[kPer]) {
  if (kind == Score::kSoftmax) return device_softmax_backward(scores, grad_scores, grad_logits);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    float slope = 1.0f;
    if (kind == Score::kSigmoid) slope = scores[i] * (1.0f - scores[i]);
    if (kind == Score::kSqrtSoftplus) {
      // The slope goes to 0 with the score.
      slope = scores[i] == 0.0f ? 0.0f : device_sigmoid(logits[i]) / (2.0f * scores[i]);
    }
    grad_logits[i] += grad_scores[i] * slope;
  }
}

__device__ inline bool shares_are_softmax(Score kind) {
  return kind == Score::kSoftmax || kind == Score::kSoftmaxAfterTopK;
}

/// shares_of: the softmax, or score / sum of scores. Returns that sum, or 1.
template <int kPer>
__device__ float device_shares(Score kind, const float (&logits)[kPer], const float (&scores)[kPer],
                               float (&shares)[kPer]) {
  if (shares_are_softmax(kind)) {
    device_softmax(logits, shares);
    return 1.0f;
  }
  const float sum = row_sum(scores) + static_cast<float>(kEpsilon);
#pragma unroll
  for (int i = 0; i < kPer; ++i) shares[i] = scores[i] / sum;
  return sum;
}

/// The weights of a token before scaling: lane k has slot k, its expert and the score of that.
struct SlotWeights {
  float weight = 0.0f;   // 0 in slots without a route
  float divisor = 1.0f;  // of the slots' scores, if they are normalised
};

/// unscaled_weights; sums as warp_sum.
__device__ inline SlotWeights slot_weights(const ScoreRules& rules, bool has_route, float score) {
  const bool is_after = rules.score == Score::kSoftmaxAfterTopK;
  SlotWeights slot;
  if (is_after) {
    const float largest = warp_max(has_route ? score : -INFINITY);
    slot.weight = has_route ? expf(score - largest) : 0.0f;
  } else {
    slot.weight = has_route ? score : 0.0f;
  }
  if (!is_after && !rules.normalises) return slot;
  const float sum = warp_sum(slot.weight);
  slot.divisor = sum + static_cast<float>(kEpsilon);
  if (is_after) slot.divisor = sum > 0.0f ? sum : 1.0f;
  if (has_route) slot.weight /= slot.divisor;
  return slot;
}

}  // namespace crossdock::router
