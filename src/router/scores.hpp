#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "crossdock/router.hpp"

// Functions of a row of E logits, forward and backward. T is float or double.

namespace crossdock::router {

inline constexpr double kEpsilon = 1e-20;

template <typename T>
T log_sum_exp(const T* logits, int64_t count) {
  const T largest = *std::max_element(logits, logits + count);
  T sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(logits[i] - largest);
  return largest + std::log(sum);
}

template <typename T>
void softmax(const T* logits, int64_t count, T* out) {
  const T largest = *std::max_element(logits, logits + count);
  T sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = std::exp(logits[i] - largest);
    sum += out[i];
  }
  for (int64_t i = 0; i < count; ++i) out[i] /= sum;
}

/// grad_logits += p * (grad - <grad, p>) for p = softmax(logits).
template <typename T>
void softmax_backward(const T* p, const T* grad, int64_t count, T* grad_logits) {
  T inner = 0;
  for (int64_t i = 0; i < count; ++i) inner += grad[i] * p[i];
  for (int64_t i = 0; i < count; ++i) grad_logits[i] += p[i] * (grad[i] - inner);
}

template <typename T>
T sigmoid(T x) {
  return T{1} / (T{1} + std::exp(-x));
}

/// log(1 + exp(x)) without overflow.
template <typename T>
T softplus(T x) {
  return std::max(x, T{0}) + std::log1p(std::exp(-std::abs(x)));
}

/// Scores for the choice and the weights; for kSoftmaxAfterTopK the logits themselves.
template <typename T>
void scores_of(Score kind, const T* logits, int64_t count, T* scores) {
  switch (kind) {
    case Score::kSoftmax:
      return softmax(logits, count, scores);
    case Score::kSoftmaxAfterTopK:
      std::copy(logits, logits + count, scores);
      return;
    case Score::kSigmoid:
      for (int64_t i = 0; i < count; ++i) scores[i] = sigmoid(logits[i]);
      return;
    case Score::kSqrtSoftplus:
      for (int64_t i = 0; i < count; ++i) scores[i] = std::sqrt(softplus(logits[i]));
      return;
  }
}

/// grad_logits += the gradient through scores_of.
template <typename T>
void scores_backward(Score kind, const T* logits, const T* scores, const T* grad_scores,
                     int64_t count, T* grad_logits) {
  switch (kind) {
    case Score::kSoftmax:
      return softmax_backward(scores, grad_scores, count, grad_logits);
    case Score::kSoftmaxAfterTopK:
      for (int64_t i = 0; i < count; ++i) grad_logits[i] += grad_scores[i];
      return;
    case Score::kSigmoid:
      for (int64_t i = 0; i < count; ++i) {
        grad_logits[i] += grad_scores[i] * scores[i] * (T{1} - scores[i]);
      }
      return;
    case Score::kSqrtSoftplus:
      for (int64_t i = 0; i < count; ++i) {
        if (scores[i] == T{0}) continue;  // the gradient tends to 0 with the score
        grad_logits[i] += grad_scores[i] * sigmoid(logits[i]) / (T{2} * scores[i]);
      }
      return;
  }
}

/// Share of each expert in the auxiliary loss: the softmax, or score / sum of scores.
template <typename T>
void shares_of(Score kind, const T* logits, const T* scores, int64_t count, T* shares) {
  if (kind == Score::kSoftmax || kind == Score::kSoftmaxAfterTopK) {
    return softmax(logits, count, shares);
  }
  T sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scores[i];
  for (int64_t i = 0; i < count; ++i) shares[i] = scores[i] / (sum + static_cast<T>(kEpsilon));
}

/// Adds the gradient through shares_of: to grad_logits for the softmax kinds, otherwise to
/// grad_scores.
template <typename T>
void shares_backward(Score kind, const T* scores, const T* shares, const T* grad_shares,
                     int64_t count, T* grad_scores, T* grad_logits) {
  if (kind == Score::kSoftmax || kind == Score::kSoftmaxAfterTopK) {
    return softmax_backward(shares, grad_shares, count, grad_logits);
  }
  T sum = 0;
  T inner = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += scores[i];
    inner += grad_shares[i] * shares[i];
  }
  for (int64_t i = 0; i < count; ++i) {
    grad_scores[i] += (grad_shares[i] - inner) / (sum + static_cast<T>(kEpsilon));
  }
}

}  // namespace crossdock::router
