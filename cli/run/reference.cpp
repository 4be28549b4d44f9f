#include "cli/run/reference.hpp"

#include "crossdock/testing/reference_router.hpp"

namespace crossdock::cli {

using reference::MlpConfig;
using reference::MlpWeights;
using Values = std::vector<double>;

namespace {

// Rows [first, first + count) of a matrix [.., width].
void append_rows(const Values& from, int64_t first, int64_t count, int64_t width, Values& to) {
  to.insert(to.end(), from.begin() + first * width, from.begin() + (first + count) * width);
}

void add(const Values& term, Values& sum) {
  for (size_t i = 0; i < term.size(); ++i) sum[i] += term[i];
}

}  // namespace

RunReference::RunReference(const RunJob& job, const RunValues& values,
                           const reference::InputNoise& noise)
    : job_(job), values_(values), noise_(noise) {
  const int64_t E = job.layer.router.num_experts;
  gate_ = matrix(Source::kGate, E, job.layer.router.width, job.dtype());
  if (job.with_biases) gate_bias_ = matrix(Source::kGateBias, E, 1, job.dtype());
  if (job.with_expert_bias) expert_bias_ = matrix(Source::kExpertBias, E, 1, job.sum_dtype());
}

Values RunReference::row(Source source, int64_t index, int64_t width, DType dtype) const {
  Values values = values_.row(source, index, width, dtype);
  if (noise_.relative > 0) {
    noise_.shake(values, (static_cast<uint64_t>(source) << 40) + static_cast<uint64_t>(index));
  }
  return values;
}

Values RunReference::matrix(Source source, int64_t height, int64_t width, DType dtype) const {
  Values all;
  for (int64_t i = 0; i < height; ++i) {
    const Values one = row(source, i, width, dtype);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

Values RunReference::token_row(Source source, int64_t index) const {
  return row(source, index, job_.layer.router.width, job_.dtype());
}

MlpConfig RunReference::mlp_config(int64_t inner) const {
  const ExpertsConfig& experts = job_.layer.experts;
  return {job_.layer.router.width, inner, experts.activation, experts.interleaved, experts.limit};
}

MlpWeights RunReference::mlp(const MlpSources& sources, int64_t index, int64_t inner) const {
  const int64_t D = job_.layer.router.width;
  const int64_t hidden = is_gated(job_.layer.experts.activation) ? 2 * inner : inner;
  MlpWeights weights;
  weights.w1 = row(sources.w1, index, hidden * D, job_.dtype());
  weights.w2 = row(sources.w2, index, D * inner, job_.dtype());
  if (!job_.with_biases) return weights;
  weights.b1 = row(sources.b1, index, hidden, job_.dtype());
  weights.b2 = row(sources.b2, index, D, job_.dtype());
  return weights;
}

RunReference::Token RunReference::token(int64_t index, const std::vector<int64_t>& ids) const {
  reference::RouterInput input{.config = job_.layer.router,
                               .T = 1,
                               .x = token_row(Source::kX, index),
                               .gate = gate_,
                               .gate_bias = gate_bias_,
                               .expert_bias = expert_bias_,
                               .mask = {},
                               .sequence_ids = {},
                               .num_sequences = 1,
                               .forced_ids = {}};
  Token token;
  token.chosen_weights = reference::route(input).weights;
  input.forced_ids = ids;
  const reference::RouterResult routes = reference::route(input);
  token.weights = routes.weights;
  const Values grad_out = token_row(Source::kGradOut, index);
  token.out.resize(grad_out.size());
  token.grad_x.resize(grad_out.size());
  // Adds the output of one expert; returns the gradient of its weight.
  const auto add_expert = [&](const MlpWeights& weights, int64_t inner, double weight) {
    const MlpConfig config = mlp_config(inner);
    add(reference::mlp_forward(config, weights, input.x, {weight}), token.out);
    if (!job_.with_backward) return 0.0;
    const reference::MlpGradients grads =
        reference::mlp_backward(config, weights, input.x, {weight}, grad_out);
    add(grads.rows, token.grad_x);
    return grads.row_weights[0];
  };
  Values grad_weights;
  for (size_t k = 0; k < ids.size(); ++k) {
    const MlpWeights expert =
        mlp({Source::kW1, Source::kW2, Source::kB1, Source::kB2}, ids[k], job_.layer.experts.inner);
    grad_weights.push_back(add_expert(expert, job_.layer.experts.inner, routes.weights[k]));
  }
  if (const int64_t inner = job_.layer.shared_inner; inner > 0) {
    add_expert(
        mlp({Source::kSharedW1, Source::kSharedW2, Source::kSharedB1, Source::kSharedB2}, 0, inner),
        inner, 1.0);
  }
  if (job_.with_backward) {
    add(reference::route_backward(input, routes, grad_weights, routes.counts).x, token.grad_x);
  }
  return token;
}

MlpWeights RunReference::cut(const MlpWeights& whole, const Slice& slice) const {
  const int64_t D = job_.layer.router.width;
  const int64_t F = job_.layer.experts.inner;
  const bool gated = is_gated(job_.layer.experts.activation);
  const auto cut_rows = [&](const Values& from, int64_t width, Values& to) {
    if (from.empty()) return;
    if (gated && job_.layer.experts.interleaved) {
      append_rows(from, 2 * slice.first, 2 * slice.count, width, to);
      return;
    }
    append_rows(from, slice.first, slice.count, width, to);
    if (gated) append_rows(from, F + slice.first, slice.count, width, to);
  };
  MlpWeights part;
  cut_rows(whole.w1, D, part.w1);
  cut_rows(whole.b1, 1, part.b1);
  for (int64_t d = 0; d < D; ++d) {
    append_rows(whole.w2, d * F + slice.first, slice.count, 1, part.w2);
  }
  part.b2 = whole.b2;
  return part;
}

MlpWeights RunReference::gradients(int64_t expert, const std::vector<Route>& routes,
                                   const Slice& slice) const {
  Values rows;
  Values row_weights;
  Values grad_y;
  for (const Route& route : routes) {
    const Values x = token_row(Source::kX, route.token);
    const Values grad = token_row(Source::kGradOut, route.token);
    rows.insert(rows.end(), x.begin(), x.end());
    grad_y.insert(grad_y.end(), grad.begin(), grad.end());
    row_weights.push_back(route.weight);
  }
  const MlpWeights whole =
      mlp({Source::kW1, Source::kW2, Source::kB1, Source::kB2}, expert, job_.layer.experts.inner);
  return reference::mlp_backward(mlp_config(slice.count), cut(whole, slice), rows, row_weights,
                                 grad_y)
      .expert;
}

}  // namespace crossdock::cli
