#include "cli/run/rank.hpp"

namespace crossdock::cli {
namespace {

// Where the tensors of one MLP per local expert come from.
struct MlpSources {
  Source w1, w2, b1, b2;
  int64_t first = 0;  // expert
  int64_t count = 0;  // experts here
  int64_t hidden = 0;
  int64_t inner = 0;
};

}  // namespace

RunTensors::RunTensors(const RunJob& job, const RunValues& values, Group& group) {
  const int64_t D = job.layer.router.width;
  const int64_t E = job.layer.router.num_experts;
  const auto tensor = [&](DType dtype, Shape shape) {
    buffers_.emplace_back(shape.num_elements() * size_of(dtype));
    return buffers_.back().view(dtype, shape);
  };
  const auto parameter = [&](Source source, int64_t first, Shape shape, DType dtype) {
    const TensorView view = tensor(dtype, shape);
    values.fill(source, first, view);
    return view;
  };
  const Shape tokens{job.num_tokens(group.rank()), D};
  const int64_t first_token = job.first_token(group.rank());
  x.view = parameter(Source::kX, first_token, tokens, job.dtype());
  grad_out.view = parameter(Source::kGradOut, first_token, tokens, job.dtype());

  weights.gate.weight = parameter(Source::kGate, 0, {E, D}, job.dtype());
  if (job.with_biases) weights.gate.bias = parameter(Source::kGateBias, 0, {E}, job.dtype());
  if (job.with_expert_bias) {
    weights.expert_bias = parameter(Source::kExpertBias, 0, {E}, job.sum_dtype());
  }
  if (job.with_backward) {
    grads.gate = tensor(job.sum_dtype(), {E, D});
    if (job.with_biases) grads.gate_bias = tensor(job.sum_dtype(), {E});
  }
  const auto make_mlp = [&](const MlpSources& mlp, ExpertWeights& parameters,
                            ExpertGradients& gradients) {
    const Shape w1{mlp.count, mlp.hidden, D};
    const Shape w2{mlp.count, D, mlp.inner};
    parameters.w1 = parameter(mlp.w1, mlp.first, w1, job.dtype());
    parameters.w2 = parameter(mlp.w2, mlp.first, w2, job.dtype());
    if (job.with_biases) {
      parameters.b1 = parameter(mlp.b1, mlp.first, {mlp.count, mlp.hidden}, job.dtype());
      parameters.b2 = parameter(mlp.b2, mlp.first, {mlp.count, D}, job.dtype());
    }
    if (!job.with_backward) return;
    gradients.w1 = tensor(job.sum_dtype(), w1);
    gradients.w2 = tensor(job.sum_dtype(), w2);
    if (!job.with_biases) return;
    gradients.b1 = tensor(job.sum_dtype(), {mlp.count, mlp.hidden});
    gradients.b2 = tensor(job.sum_dtype(), {mlp.count, D});
  };
  const int64_t first = first_expert(E, group.size(), group.rank());
  const int64_t count = first_expert(E, group.size(), group.rank() + 1) - first;
  const int64_t inner = job.layer.experts.inner;
  const int64_t shared = job.layer.shared_inner;
  const int64_t halves = is_gated(job.layer.experts.activation) ? 2 : 1;
  make_mlp(
      {Source::kW1, Source::kW2, Source::kB1, Source::kB2, first, count, halves * inner, inner},
      weights.experts, grads.experts);
  if (shared == 0) return;
  make_mlp({Source::kSharedW1, Source::kSharedW2, Source::kSharedB1, Source::kSharedB2, 0, 1,
            halves * shared, shared},
           weights.shared, grads.shared);
}

}  // namespace crossdock::cli
