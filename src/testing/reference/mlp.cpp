#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "core/check.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

// A value and its derivatives with respect to gate (or the only input) and linear.
struct Activated {
  double value = 0.0;
  double by_gate = 0.0;
  double by_linear = 0.0;
};

double sigmoid(double h) {
  return 1.0 / (1.0 + std::exp(-h));
}

// gelu(h) = h * Phi(h), Phi the normal distribution.
Activated gelu(double h) {
  const double phi = 0.5 * std::erfc(-h / std::numbers::sqrt2);
  const double density = std::exp(-0.5 * h * h) / std::sqrt(2.0 * std::numbers::pi);
  return {h * phi, phi + h * density, 0.0};
}

Activated gelu_tanh(double h) {
  const double scale = std::sqrt(2.0 / std::numbers::pi);
  const double t = std::tanh(scale * (h + 0.044715 * h * h * h));
  const double inner_slope = scale * (1.0 + 3.0 * 0.044715 * h * h);
  return {0.5 * h * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * h * (1.0 - t * t) * inner_slope, 0.0};
}

// h * sigmoid(slope * h)
Activated sigmoid_gate(double h, double slope) {
  const double s = sigmoid(slope * h);
  return {h * s, s + h * slope * s * (1.0 - s), 0.0};
}

Activated times_linear(const Activated& gate, double linear) {
  return {gate.value * linear, gate.by_gate * linear, gate.value};
}

// gate * sigmoid(factor * gate) * (linear + offset), both clamped. A clamped input passes its
// gradient through at the limit, but not beyond it. NaN is not clamped.
Activated clamped(double gate, double linear, double limit, double factor, double offset) {
  const bool gate_stops = gate > limit;
  const bool linear_stops = linear < -limit || linear > limit;
  Activated left = sigmoid_gate(gate_stops ? limit : gate, factor);
  if (gate_stops) left.by_gate = 0.0;
  Activated result =
      times_linear(left, (linear_stops ? std::copysign(limit, linear) : linear) + offset);
  if (linear_stops) result.by_linear *= 0.0;
  return result;
}

Activated activate(const MlpConfig& config, double gate, double linear) {
  switch (config.activation) {
    case Activation::kSwiglu:
      return times_linear(sigmoid_gate(gate, 1.0), linear);
    case Activation::kClampedSwiglu:
      return clamped(gate, linear, config.limit, 1.702, 1.0);
    case Activation::kGeglu:
      return times_linear(gelu(gate), linear);
    case Activation::kGelu:
      return gelu(gate);
    case Activation::kGeluTanh:
      return gelu_tanh(gate);
    case Activation::kGegluTanh:
      return times_linear(gelu_tanh(gate), linear);
    case Activation::kLimitedSwiglu:
      return clamped(gate, linear, config.limit, 1.0, 0.0);
    case Activation::kSquaredRelu: {
      const double positive = gate < 0.0 ? 0.0 : gate;  // NaN stays
      return {positive * positive, 2.0 * positive, 0.0};
    }
  }
  throw Error(ErrorCode::kInternal, "an activation without a formula");
}

// The rows of W1 that compute gate f and linear f (the same row if there is no gate).
std::pair<int64_t, int64_t> w1_rows(const MlpConfig& config, int64_t f) {
  if (!is_gated(config.activation)) return {f, f};
  if (config.interleaved) return {2 * f, 2 * f + 1};
  return {f, config.F + f};
}

int64_t w1_height(const MlpConfig& config) {
  return is_gated(config.activation) ? 2 * config.F : config.F;
}

void check_sizes(const MlpConfig& config, const MlpWeights& expert) {
  const auto height = static_cast<size_t>(w1_height(config));
  const auto D = static_cast<size_t>(config.D);
  CROSSDOCK_CHECK(expert.w1.size() == height * D, "w1 must be [", height, ", ", D, "]; got ",
                  expert.w1.size(), " values");
  CROSSDOCK_CHECK(expert.w2.size() == D * static_cast<size_t>(config.F), "w2 must be [", D, ", ",
                  config.F, "]; got ", expert.w2.size(), " values");
  CROSSDOCK_CHECK(expert.b1.empty() || expert.b1.size() == height, "b1 must be [", height,
                  "]; got ", expert.b1.size(), " values");
  CROSSDOCK_CHECK(expert.b2.empty() || expert.b2.size() == D, "b2 must be [", D, "]; got ",
                  expert.b2.size(), " values");
}

// matrix [height, width] row i times v
double dot_row(const std::vector<double>& matrix, int64_t i, const double* v, int64_t width) {
  double sum = 0.0;
  for (int64_t j = 0; j < width; ++j) sum += matrix[static_cast<size_t>(i * width + j)] * v[j];
  return sum;
}

double at_or_zero(const std::vector<double>& values, int64_t i) {
  return values.empty() ? 0.0 : values[static_cast<size_t>(i)];
}

// act(W1 x + b1) and its derivatives. [F]
std::vector<Activated> inner_layer(const MlpConfig& config, const MlpWeights& expert,
                                   const double* x) {
  std::vector<Activated> inner;
  for (int64_t f = 0; f < config.F; ++f) {
    const auto [gate, linear] = w1_rows(config, f);
    inner.push_back(
        activate(config, dot_row(expert.w1, gate, x, config.D) + at_or_zero(expert.b1, gate),
                 dot_row(expert.w1, linear, x, config.D) + at_or_zero(expert.b1, linear)));
  }
  return inner;
}

// Adds h times x to row i of grad_w1, h to entry i of grad_b1, and row i of W1 times h to grad_x.
void backward_of_w1_row(const MlpConfig& config, const MlpWeights& expert, int64_t i, double h,
                        const double* x, double* grad_x, MlpWeights& grads) {
  for (int64_t d = 0; d < config.D; ++d) {
    grads.w1[static_cast<size_t>(i * config.D + d)] += h * x[d];
    grad_x[d] += h * expert.w1[static_cast<size_t>(i * config.D + d)];
  }
  if (!grads.b1.empty()) grads.b1[static_cast<size_t>(i)] += h;
}

// Backward of one row with weight p: fills grad_x [D], adds to grads, returns the weight's
// gradient.
double backward_of_row(const MlpConfig& config, const MlpWeights& expert, const double* x, double p,
                       const double* g, double* grad_x, MlpWeights& grads) {
  const std::vector<Activated> inner = inner_layer(config, expert, x);
  double grad_p = 0.0;
  for (int64_t f = 0; f < config.F; ++f) {
    const Activated& a = inner[static_cast<size_t>(f)];
    double w2_g = 0.0;  // entry f of W2 transposed times g
    for (int64_t d = 0; d < config.D; ++d) {
      w2_g += expert.w2[static_cast<size_t>(d * config.F + f)] * g[d];
      grads.w2[static_cast<size_t>(d * config.F + f)] += p * a.value * g[d];
    }
    grad_p += a.value * w2_g;
    const auto [gate, linear] = w1_rows(config, f);
    backward_of_w1_row(config, expert, gate, p * w2_g * a.by_gate, x, grad_x, grads);
    if (linear != gate) {
      backward_of_w1_row(config, expert, linear, p * w2_g * a.by_linear, x, grad_x, grads);
    }
  }
  for (int64_t d = 0; d < config.D && !expert.b2.empty(); ++d) {
    grad_p += expert.b2[static_cast<size_t>(d)] * g[d];
    grads.b2[static_cast<size_t>(d)] += p * g[d];
  }
  return grad_p;
}

}  // namespace

MlpWeights shard_of(const MlpConfig& config, const MlpWeights& expert, int64_t etp, int64_t index) {
  std::vector<int64_t> owners;  // [F]
  for (int64_t j = 0; j < etp; ++j) {
    owners.resize(owners.size() + static_cast<size_t>(config.F / etp + (j < config.F % etp)), j);
  }
  std::vector<bool> is_kept(static_cast<size_t>(w1_height(config)));  // rows of W1
  for (int64_t f = 0; f < config.F; ++f) {
    const auto [gate, linear] = w1_rows(config, f);
    const bool is_own = owners[static_cast<size_t>(f)] == index;
    is_kept[static_cast<size_t>(gate)] = is_kept[static_cast<size_t>(linear)] = is_own;
  }
  MlpWeights part{.b2 = expert.b2};
  for (size_t i = 0; i < expert.w1.size(); ++i) {
    if (is_kept[i / static_cast<size_t>(config.D)]) part.w1.push_back(expert.w1[i]);
  }
  for (size_t i = 0; i < expert.b1.size(); ++i) {
    if (is_kept[i]) part.b1.push_back(expert.b1[i]);
  }
  for (size_t i = 0; i < expert.w2.size(); ++i) {
    if (owners[i % static_cast<size_t>(config.F)] == index) part.w2.push_back(expert.w2[i]);
  }
  return part;
}

std::vector<double> mlp_forward(const MlpConfig& config, const MlpWeights& expert,
                                const std::vector<double>& rows,
                                const std::vector<double>& row_weights) {
  check_sizes(config, expert);
  std::vector<double> y(rows.size());
  const int64_t num_rows = config.D > 0 ? static_cast<int64_t>(rows.size()) / config.D : 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const double p = row_weights.empty() ? 1.0 : row_weights[static_cast<size_t>(r)];
    std::vector<double> scaled;  // [F] p times the activation
    for (const Activated& a : inner_layer(config, expert, rows.data() + r * config.D)) {
      scaled.push_back(p * a.value);
    }
    for (int64_t d = 0; d < config.D; ++d) {
      double& entry = y[static_cast<size_t>(r * config.D + d)];
      entry = dot_row(expert.w2, d, scaled.data(), config.F);
      if (!expert.b2.empty()) entry += p * expert.b2[static_cast<size_t>(d)];
    }
  }
  return y;
}

MlpGradients mlp_backward(const MlpConfig& config, const MlpWeights& expert,
                          const std::vector<double>& rows, const std::vector<double>& row_weights,
                          const std::vector<double>& grad_y) {
  check_sizes(config, expert);
  CROSSDOCK_CHECK(grad_y.size() == rows.size(), "grad_y must have as many values as rows (",
                  rows.size(), "); got ", grad_y.size());
  const auto zeros_like = [](const std::vector<double>& v) {
    return std::vector<double>(v.size());
  };
  MlpGradients grads{.rows = zeros_like(rows),
                     .row_weights = {},
                     .expert = {zeros_like(expert.w1), zeros_like(expert.w2), zeros_like(expert.b1),
                                zeros_like(expert.b2)}};
  const int64_t num_rows = config.D > 0 ? static_cast<int64_t>(rows.size()) / config.D : 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const double p = row_weights.empty() ? 1.0 : row_weights[static_cast<size_t>(r)];
    grads.row_weights.push_back(backward_of_row(config, expert, rows.data() + r * config.D, p,
                                                grad_y.data() + r * config.D,
                                                grads.rows.data() + r * config.D, grads.expert));
  }
  return grads;
}

}  // namespace crossdock::reference
