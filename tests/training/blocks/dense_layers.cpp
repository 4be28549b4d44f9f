#include "dense_layers.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace train {
namespace {

// Row t of [T, width].
template <typename Values>
auto* row(Values& values, int64_t t, int64_t width) {
  return values.data() + t * width;
}

template <typename Real>
Real dot(const Real* a, const Real* b, int64_t count) {
  Real sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// to += factor * from
template <typename Real>
void add(Real factor, const Real* from, Real* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

template <typename Real>
Real inverse_rms(const Real* x, int64_t D) {
  return 1 / std::sqrt(dot(x, x, D) / static_cast<Real>(D) + static_cast<Real>(1e-6));
}

// Replaces logits with their softmax; returns -log softmax[target].
template <typename Real>
double softmax(Real* logits, int64_t V, int64_t target) {
  const Real largest = *std::max_element(logits, logits + V);
  const Real of_target = logits[target];
  Real sum = 0;
  for (int64_t v = 0; v < V; ++v) sum += logits[v] = std::exp(logits[v] - largest);
  for (int64_t v = 0; v < V; ++v) logits[v] /= sum;
  return static_cast<double>(std::log(sum) + largest - of_target);
}

}  // namespace

template <typename Real>
void Embedding<Real>::forward(const std::vector<Real>& of_bytes,
                              const std::vector<Real>& of_positions, std::vector<Real>& x) const {
  const int64_t T = std::ssize(bytes);
  x.assign(static_cast<size_t>(T * D), 0);
  for (int64_t t = 0; t < T; ++t) {
    add<Real>(1, row(of_bytes, bytes[t], D), row(x, t, D), D);
    add<Real>(1, row(of_positions, positions[t], D), row(x, t, D), D);
  }
}

template <typename Real>
void Embedding<Real>::backward(const std::vector<Real>& grad_x, std::vector<Real>& grad_of_bytes,
                               std::vector<Real>& grad_of_positions) const {
  for (int64_t t = 0; t < std::ssize(bytes); ++t) {
    add<Real>(1, row(grad_x, t, D), row(grad_of_bytes, bytes[t], D), D);
    add<Real>(1, row(grad_x, t, D), row(grad_of_positions, positions[t], D), D);
  }
}

template <typename Real>
void RmsNorm<Real>::forward(const std::vector<Real>& x, std::vector<Real>& out) const {
  const int64_t D = std::ssize(scale);
  out.resize(x.size());
  for (int64_t t = 0; t < std::ssize(x) / D; ++t) {
    const Real r = inverse_rms(row(x, t, D), D);
    for (int64_t d = 0; d < D; ++d) row(out, t, D)[d] = scale[d] * row(x, t, D)[d] * r;
  }
}

template <typename Real>
void RmsNorm<Real>::backward(const std::vector<Real>& x, const std::vector<Real>& grad_out,
                             std::vector<Real>& grad_x, std::vector<Real>& grad_scale) const {
  const int64_t D = std::ssize(scale);
  std::vector<Real> scaled(scale.size());  // grad_out * scale
  for (int64_t t = 0; t < std::ssize(x) / D; ++t) {
    const Real* of_x = row(x, t, D);
    const Real r = inverse_rms(of_x, D);
    for (int64_t d = 0; d < D; ++d) {
      scaled[d] = row(grad_out, t, D)[d] * scale[d];
      grad_scale[d] += row(grad_out, t, D)[d] * of_x[d] * r;
    }
    const Real along = dot(scaled.data(), of_x, D) * r * r * r / static_cast<Real>(D);
    add(r, scaled.data(), row(grad_x, t, D), D);
    add(-along, of_x, row(grad_x, t, D), D);
  }
}

template <typename Real>
double Head<Real>::loss(const std::vector<Real>& x, const std::vector<int32_t>& targets,
                        double factor, std::vector<Real>& grad_logits) const {
  const int64_t V = std::ssize(weight) / D;
  grad_logits.assign(targets.size() * static_cast<size_t>(V), 0);
  double loss = 0.0;
  for (int64_t t = 0; t < std::ssize(targets); ++t) {
    const int64_t target = targets[t];
    if (target < 0) continue;
    Real* logits = row(grad_logits, t, V);
    for (int64_t v = 0; v < V; ++v) logits[v] = dot(row(x, t, D), row(weight, v, D), D);
    loss += softmax(logits, V, target);
    logits[target] -= 1;
    for (int64_t v = 0; v < V; ++v) logits[v] *= static_cast<Real>(factor);
  }
  return loss;
}

template <typename Real>
void Head<Real>::backward(const std::vector<Real>& x, const std::vector<Real>& grad_logits,
                          std::vector<Real>& grad_x, std::vector<Real>& grad_weight) const {
  const int64_t V = std::ssize(weight) / D;
  grad_x.assign(x.size(), 0);
  for (int64_t t = 0; t < std::ssize(x) / D; ++t) {
    for (int64_t v = 0; v < V; ++v) {
      const Real grad = row(grad_logits, t, V)[v];
      add(grad, row(weight, v, D), row(grad_x, t, D), D);
      add(grad, row(x, t, D), row(grad_weight, v, D), D);
    }
  }
}

template struct Embedding<float>;
template struct Embedding<double>;
template struct RmsNorm<float>;
template struct RmsNorm<double>;
template struct Head<float>;
template struct Head<double>;

}  // namespace train
