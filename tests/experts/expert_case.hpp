#pragma once

#include <gtest/gtest.h>

#include <algorithm>
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

  /// Values of all experts, concatenated.
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

/// The results, as doubles.
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

/// All tensors of a case, in one memory; outputs are pre-filled with NaN.
struct ExpertTensors {
  OwnedTensor w1, w2, b1, b2;                      // no biases without with_bias
  OwnedTensor rows, grad_y, row_weights;           // inputs
  OwnedTensor starts, counts;                      // of the segments, int64
  OwnedTensor y, grad_rows, grad_row_weights;      // outputs
  OwnedTensor grad_w1, grad_w2, grad_b1, grad_b2;  // outputs
  Stream stream;

  /// In host memory.
  ExpertTensors(const ExpertCase& test, double initial_gradient) {
    const ExpertsConfig& config = test.config;
    const DType dtype = config.dtype;
    const DType sums = test.sum_dtype();
    const int64_t E_local = config.num_local_experts;
    const int64_t D = config.width;
    const int64_t hidden = config.hidden_width();
    const auto filled = [](DType type, Shape shape, double value) {
      return reference::to_tensor(
          type, shape, std::vector<double>(static_cast<size_t>(shape.num_elements()), value));
    };
    using Weights = reference::MlpWeights;
    const auto weights = [&](std::vector<double> Weights::*member, Shape shape) {
      return reference::to_tensor(dtype, shape, test.gathered(member));
    };
    const auto matrix = [&](int64_t height, int64_t width) {
      return config.transposed ? Shape{E_local, width, height} : Shape{E_local, height, width};
    };
    const Shape w1_shape = matrix(hidden, D);
    const Shape w2_shape = matrix(D, config.inner);
    w1 = weights(&Weights::w1, w1_shape);
    w2 = weights(&Weights::w2, w2_shape);
    if (test.with_bias) {
      b1 = weights(&Weights::b1, {E_local, hidden});
      b2 = weights(&Weights::b2, {E_local, D});
    }
    rows = reference::to_tensor(dtype, {test.R, D}, test.rows);
    grad_y = reference::to_tensor(dtype, {test.R, D}, test.grad_y);
    row_weights = reference::to_tensor(sums, {test.R}, test.row_weights);
    const auto borrowed = [](const std::vector<int64_t>& values) {
      return OwnedTensor{
          TensorView(const_cast<int64_t*>(values.data()), {static_cast<int64_t>(values.size())}),
          nullptr};
    };
    starts = borrowed(test.starts);
    counts = borrowed(test.counts);
    y = filled(dtype, {test.R, D}, kNaN);
    grad_rows = filled(dtype, {test.R, D}, kNaN);
    grad_row_weights = filled(sums, {test.R}, kNaN);
    grad_w1 = filled(sums, w1_shape, initial_gradient);
    grad_w2 = filled(sums, w2_shape, initial_gradient);
    grad_b1 = filled(sums, {E_local, hidden}, initial_gradient);
    grad_b2 = filled(sums, {E_local, D}, initial_gradient);
  }

  std::vector<OwnedTensor*> all() {
    return {&w1,          &w2,      &b1,      &b2,     &rows,      &grad_y,
            &row_weights, &starts,  &counts,  &y,      &grad_rows, &grad_row_weights,
            &grad_w1,     &grad_w2, &grad_b1, &grad_b2};
  }

  Segments segments() const {
    return {static_cast<const int64_t*>(starts.view.data),
            static_cast<const int64_t*>(counts.view.data), counts.view.num_rows(),
            counts.view.device};
  }
  ExpertWeights weights() const { return {w1.view, w2.view, b1.view, b2.view}; }

  ExpertsForwardArgs forward_args() const {
    return {.weights = weights(),
            .rows = rows.view,
            .segments = segments(),
            .row_weights = row_weights.view,
            .y = y.view,
            .stream = stream};
  }
  ExpertsBackwardDxArgs dx_args(ExpertsSaved& saved) const {
    return {.weights = weights(),
            .rows = rows.view,
            .segments = segments(),
            .row_weights = row_weights.view,
            .grad_y = grad_y.view,
            .saved = &saved,
            .grad_rows = grad_rows.view,
            .grad_row_weights = grad_row_weights.view,
            .stream = stream};
  }
  ExpertsBackwardDwArgs dw_args(const ExpertsSaved& saved, bool accumulate = false) const {
    return {.rows = rows.view,
            .segments = segments(),
            .row_weights = row_weights.view,
            .grad_y = grad_y.view,
            .saved = &saved,
            .grads = {grad_w1.view, grad_w2.view, grad_b1.view, grad_b2.view},
            .accumulate = accumulate,
            .stream = stream};
  }

  /// REQUIRES: host memory.
  ExpertResult result() const {
    const auto values = [](const OwnedTensor& owned) { return reference::to_values(owned.view); };
    return {values(y),       values(grad_rows), values(grad_row_weights), values(grad_w1),
            values(grad_w2), values(grad_b1),   values(grad_b2)};
  }
};

/// Forward, backward_dx and backward_dw.
inline void run_step(const Experts& experts, const ExpertTensors& tensors,
                     bool accumulate = false) {
  ExpertsSaved saved = experts.forward(tensors.forward_args());
  experts.backward_dx(tensors.dx_args(saved));
  experts.backward_dw(tensors.dw_args(saved, accumulate));
}

/// A step in host memory.
inline ExpertResult run_experts(const ExpertCase& test, const RunOptions& options = {}) {
  const ExpertTensors tensors(test, options.initial_gradient);
  run_step(Experts(test.config, options.pool), tensors, options.accumulate);
  return tensors.result();
}

/// The same step by the reference, expert by expert; 0 outside the segments.
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

/// Hidden values are rounded to the dtype before they are clamped. Half-way between two values of
/// bf16 (nearly) and of fp16, so rounding does not move a value across the limit.
inline constexpr double kLimit = 1.50439453125;

/// Largest error of a result, relative to the largest value of its kind.
inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 1e-13;
    case DType::kF32:
      return 2e-6;
    case DType::kF16:
      return 2e-3;
    default:
      return 1.5e-2;
  }
}

inline void expect_close(const char* name, const std::vector<double>& got,
                         const std::vector<double>& wanted, double relative) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  double largest = 0.0;
  for (const double value : wanted) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - wanted[i]), relative * largest) << name << " at " << i;
    if (wanted[i] == 0.0) {
      ASSERT_EQ(got[i], 0.0) << name << " at " << i;
    }
  }
}

inline void expect_close(const ExpertResult& got, const ExpertResult& wanted, double relative) {
  expect_close("y", got.y, wanted.y, relative);
  expect_close("grad_rows", got.grad_rows, wanted.grad_rows, relative);
  expect_close("grad_row_weights", got.grad_row_weights, wanted.grad_row_weights, relative);
  expect_close("grad_w1", got.w1, wanted.w1, relative);
  expect_close("grad_w2", got.w2, wanted.w2, relative);
}

}  // namespace crossdock
