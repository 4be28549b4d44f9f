#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "crossdock/router.hpp"
#include "router/scores.hpp"

// The weights of one token from its scores and chosen experts, forward and backward. Slots without
// a route (-1) have weight 0 and are skipped.

namespace crossdock::router {

/// Weights before scaling: the chosen scores, as they are, normalised or after a softmax over them.
template <typename T>
void unscaled_weights(const RouterConfig& config, const T* scores, const int32_t* ids, T* weights) {
  const int64_t K = config.top_k;
  T divisor = 1;
  T largest = 0;
  if (config.score == Score::kSoftmaxAfterTopK) {
    bool is_first = true;
    for (int64_t k = 0; k < K; ++k) {
      if (ids[k] < 0) continue;
      largest = is_first ? scores[ids[k]] : std::max(largest, scores[ids[k]]);
      is_first = false;
    }
  }
  T sum = 0;
  for (int64_t k = 0; k < K; ++k) {
    weights[k] = 0;
    if (ids[k] < 0) continue;
    const T score = scores[ids[k]];
    weights[k] = config.score == Score::kSoftmaxAfterTopK ? std::exp(score - largest) : score;
    sum += weights[k];
  }
  if (config.score == Score::kSoftmaxAfterTopK) divisor = sum > T{0} ? sum : T{1};
  if (config.normalises()) divisor = sum + static_cast<T>(kEpsilon);
  for (int64_t k = 0; k < K; ++k) weights[k] /= divisor;
}

template <typename T>
void route_weights(const RouterConfig& config, const T* scores, const int32_t* ids, T* weights) {
  unscaled_weights(config, scores, ids, weights);
  for (int64_t k = 0; k < config.top_k; ++k) weights[k] *= static_cast<T>(config.scaling);
}

/// grad_scores[ids[k]] += the gradient through route_weights. `weights` [K] is scratch.
template <typename T>
void route_weights_backward(const RouterConfig& config, const T* scores, const int32_t* ids,
                            const T* grad_weights, T* weights, T* grad_scores) {
  const int64_t K = config.top_k;
  const T scaling = static_cast<T>(config.scaling);
  unscaled_weights(config, scores, ids, weights);
  T sum = 0;
  T inner = 0;
  for (int64_t k = 0; k < K; ++k) {
    if (ids[k] < 0) continue;
    sum += scores[ids[k]];
    inner += grad_weights[k] * weights[k];
  }
  for (int64_t k = 0; k < K; ++k) {
    if (ids[k] < 0) continue;
    T slope = grad_weights[k];
    if (config.score == Score::kSoftmaxAfterTopK) {
      slope = weights[k] * (grad_weights[k] - inner);
    } else if (config.normalises()) {
      slope = (grad_weights[k] - inner) / (sum + static_cast<T>(kEpsilon));
    }
    grad_scores[ids[k]] += scaling * slope;
  }
}

}  // namespace crossdock::router
