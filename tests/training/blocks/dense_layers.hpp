#pragma once

#include <cstdint>
#include <vector>

namespace train {

// The parts of the model other than the MoE layer, on this rank's T tokens. Each backward is below
// its forward; it adds to the gradients of parameters and overwrites other gradients.

/// x[t] = of_bytes[bytes[t]] + of_positions[positions[t]]
template <typename Real>
struct Embedding {
  const std::vector<int32_t>& bytes;      // [T]
  const std::vector<int64_t>& positions;  // [T]
  int64_t D;

  void forward(const std::vector<Real>& of_bytes,      // [V, D]
               const std::vector<Real>& of_positions,  // [L, D]
               std::vector<Real>& x) const;            // [T, D]
  void backward(const std::vector<Real>& grad_x, std::vector<Real>& grad_of_bytes,
                std::vector<Real>& grad_of_positions) const;
};

/// out[t] = scale * x[t] / sqrt(mean of x[t]^2)
template <typename Real>
struct RmsNorm {
  const std::vector<Real>& scale;  // [D]

  void forward(const std::vector<Real>& x, std::vector<Real>& out) const;
  /// Adds to grad_x.
  void backward(const std::vector<Real>& x, const std::vector<Real>& grad_out,
                std::vector<Real>& grad_x, std::vector<Real>& grad_scale) const;
};

/// Predicts the next byte: logits = x * weight^T, loss = -log softmax(logits)[target].
template <typename Real>
struct Head {
  const std::vector<Real>& weight;  // [V, D]
  int64_t D;

  /// The sum of the losses of all tokens with a target. Sets grad_logits [T, V] to the gradient of
  /// factor * this sum.
  double loss(const std::vector<Real>& x, const std::vector<int32_t>& targets, double factor,
              std::vector<Real>& grad_logits) const;
  void backward(const std::vector<Real>& x, const std::vector<Real>& grad_logits,
                std::vector<Real>& grad_x, std::vector<Real>& grad_weight) const;
};

}  // namespace train
