#pragma once

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "crossdock/experts.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Rows of several experts, as a dispatch would leave them: segments with pad rows, and a tail past
/// the last segment. Everything outside the segments is NaN in inputs and outputs.
struct ExpertCase {
  ExpertsConfig config;
  std::vector<int64_t> counts;  // [E_local]
  std::vector<int64_t> starts;  // [E_local + 1]
  int64_t R = 0;                // rows of the tensors
  bool with_bias = true;
  std::vector<double> rows;                    // [R, D]
  std::vector<double> grad_y;                  // [R, D]
  std::vector<double> row_weights;             // [R]
  std::vector<reference::MlpWeights> experts;  // [E_local]

  ExpertCase(ExpertsConfig config_in, std::vector<int64_t> counts_in, bool with_bias_in,
             int64_t alignment = 4, int64_t num_tail_rows = 3)
      : config(config_in), counts(std::move(counts_in)), starts{0}, with_bias(with_bias_in) {
    config.num_local_experts = static_cast<int64_t>(counts.size());
    for (const int64_t count : counts) {
      starts.push_back(starts.back() + (count + alignment - 1) / alignment * alignment);
    }
    R = starts.back() + num_tail_rows;
    rows.assign(static_cast<size_t>(R * config.width), kNaN);
    grad_y = rows;
    row_weights.assign(static_cast<size_t>(R), kNaN);
    fill();
  }

  Segments segments() const { return {starts.data(), counts.data(), config.num_local_experts, {}}; }
  DType sum_dtype() const { return config.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

  /// Values of all experts, one after the other.
  std::vector<double> gathered(std::vector<double> reference::MlpWeights::*member) const {
    std::vector<double> all;
    for (const auto& expert : experts) {
      all.insert(all.end(), (expert.*member).begin(), (expert.*member).end());
    }
    return all;
  }

  reference::MlpConfig reference_config() const {
    return {config.width, config.inner, config.activation, config.interleaved, config.limit};
  }

 private:
  double draw(double scale, DType dtype) {
    return reference::round_to(dtype, scale * normal_(generator_));
  }
  std::vector<double> draw_all(int64_t count, double scale) {
    std::vector<double> values(static_cast<size_t>(count));
    for (double& value : values) value = draw(scale, config.dtype);
    return values;
  }

  void fill() {
    const int64_t D = config.width;
    const int64_t F = config.inner;
    const int64_t hidden = config.hidden_width();
    for (int64_t e = 0; e < config.num_local_experts; ++e) {
      reference::MlpWeights expert;
      expert.w1 = draw_all(hidden * D, 1.0 / std::sqrt(static_cast<double>(D)));
      expert.w2 = draw_all(D * F, 1.0 / std::sqrt(static_cast<double>(F)));
      if (with_bias) {
        expert.b1 = draw_all(hidden, 0.5);
        expert.b2 = draw_all(D, 0.5);
      }
      experts.push_back(expert);
      const auto i = static_cast<size_t>(e);
      for (int64_t row = starts[i]; row < starts[i] + counts[i]; ++row) {
        row_weights[static_cast<size_t>(row)] = draw(1.0, sum_dtype());
        for (int64_t d = 0; d < D; ++d) {
          rows[static_cast<size_t>(row * D + d)] = draw(1.0, config.dtype);
          grad_y[static_cast<size_t>(row * D + d)] = draw(1.0, config.dtype);
        }
      }
    }
  }

  std::mt19937_64 generator_{7};
  std::normal_distribution<double> normal_;
};

/// What came out, as doubles.
struct ExpertResult {
  std::vector<double> y;                 // [R, D]
  std::vector<double> grad_rows;         // [R, D]
  std::vector<double> grad_row_weights;  // [R]
  std::vector<double> w1, w2, b1, b2;    // gradients, all experts
  friend bool operator==(const ExpertResult&, const ExpertResult&) = default;
};

struct RunOptions {
  std::shared_ptr<ThreadPool> pool;
  bool accumulate = false;
  double initial_gradient = kNaN;
};

/// Forward, backward_dx and backward_dw through Experts; outputs pre-filled with NaN.
inline ExpertResult run_experts(const ExpertCase& test, const RunOptions& options = {}) {
  const ExpertsConfig& config = test.config;
  const int64_t E_local = config.num_local_experts;
  const int64_t D = config.width;
  const int64_t hidden = config.hidden_width();
  const auto tensor = [](DType dtype, Shape shape, const std::vector<double>& values) {
    return reference::to_tensor(dtype, shape, values);
  };
  const auto filled = [&](DType dtype, Shape shape, double value) {
    return tensor(dtype, shape,
                  std::vector<double>(static_cast<size_t>(shape.num_elements()), value));
  };
  using Weights = reference::MlpWeights;
  const Shape w1_shape{E_local, hidden, D};
  const Shape w2_shape{E_local, D, config.inner};
  const OwnedTensor w1 = tensor(config.dtype, w1_shape, test.gathered(&Weights::w1));
  const OwnedTensor w2 = tensor(config.dtype, w2_shape, test.gathered(&Weights::w2));
  OwnedTensor b1;
  OwnedTensor b2;
  if (test.with_bias) {
    b1 = tensor(config.dtype, {E_local, hidden}, test.gathered(&Weights::b1));
    b2 = tensor(config.dtype, {E_local, D}, test.gathered(&Weights::b2));
  }
  const ExpertWeights weights{w1.view, w2.view, b1.view, b2.view};
  const DType sums = test.sum_dtype();
  const OwnedTensor rows = tensor(config.dtype, {test.R, D}, test.rows);
  const OwnedTensor grad_y = tensor(config.dtype, {test.R, D}, test.grad_y);
  const OwnedTensor row_weights = tensor(sums, {test.R}, test.row_weights);
  const OwnedTensor y = filled(config.dtype, {test.R, D}, kNaN);
  const OwnedTensor grad_rows = filled(config.dtype, {test.R, D}, kNaN);
  const OwnedTensor grad_row_weights = filled(sums, {test.R}, kNaN);
  const OwnedTensor grad_w1 = filled(sums, w1_shape, options.initial_gradient);
  const OwnedTensor grad_w2 = filled(sums, w2_shape, options.initial_gradient);
  const OwnedTensor grad_b1 = filled(sums, {E_local, hidden}, options.initial_gradient);
  const OwnedTensor grad_b2 = filled(sums, {E_local, D}, options.initial_gradient);

  const Experts experts(config, options.pool);
  ExpertsSaved saved = experts.forward({.weights = weights,
                                        .rows = rows.view,
                                        .segments = test.segments(),
                                        .row_weights = row_weights.view,
                                        .y = y.view});
  experts.backward_dx({.weights = weights,
                       .rows = rows.view,
                       .segments = test.segments(),
                       .row_weights = row_weights.view,
                       .grad_y = grad_y.view,
                       .saved = &saved,
                       .grad_rows = grad_rows.view,
                       .grad_row_weights = grad_row_weights.view});
  experts.backward_dw({.rows = rows.view,
                       .segments = test.segments(),
                       .row_weights = row_weights.view,
                       .grad_y = grad_y.view,
                       .saved = &saved,
                       .grads = {grad_w1.view, grad_w2.view, grad_b1.view, grad_b2.view},
                       .accumulate = options.accumulate});
  const auto values = [](const OwnedTensor& owned) { return reference::to_values(owned.view); };
  return {values(y),       values(grad_rows), values(grad_row_weights), values(grad_w1),
          values(grad_w2), values(grad_b1),   values(grad_b2)};
}

/// The same by the reference, expert by expert; 0 outside the segments.
inline ExpertResult run_reference(const ExpertCase& test) {
  const int64_t D = test.config.width;
  ExpertResult result;
  result.y.assign(static_cast<size_t>(test.R * D), 0.0);
  result.grad_rows = result.y;
  result.grad_row_weights.assign(static_cast<size_t>(test.R), 0.0);
  for (size_t e = 0; e < test.counts.size(); ++e) {
    const auto part = [&](const std::vector<double>& all, int64_t width) {
      return std::vector<double>(all.begin() + test.starts[e] * width,
                                 all.begin() + (test.starts[e] + test.counts[e]) * width);
    };
    const auto put = [&](const std::vector<double>& values, int64_t width,
                         std::vector<double>& to) {
      std::copy(values.begin(), values.end(), to.begin() + test.starts[e] * width);
    };
    const auto rows = part(test.rows, D);
    const auto weights = part(test.row_weights, 1);
    const bool in_experts = test.config.weights_in == WeightsIn::kExperts;
    put(reference::mlp_forward(test.reference_config(), test.experts[e], rows,
                               in_experts ? weights : std::vector<double>{}),
        D, result.y);
    const reference::MlpGradients grads = reference::mlp_backward(
        test.reference_config(), test.experts[e], rows, weights, part(test.grad_y, D));
    put(grads.rows, D, result.grad_rows);
    put(grads.row_weights, 1, result.grad_row_weights);
    const auto append = [](const std::vector<double>& values, std::vector<double>& to) {
      to.insert(to.end(), values.begin(), values.end());
    };
    append(grads.expert.w1, result.w1);
    append(grads.expert.w2, result.w2);
    append(grads.expert.b1, result.b1);
    append(grads.expert.b2, result.b2);
  }
  return result;
}

}  // namespace crossdock
