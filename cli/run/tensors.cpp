#include "cli/run/rank.hpp"

namespace crossdock::cli {
namespace {

// The sources of the tensors of one MLP per local expert.
struct MlpSources {
  Source w1, w2, b1, b2;
  int64_t first = 0;  // expert
  int64_t count = 0;  // local experts
  int64_t inner = 0;
};

// Allocates tensors and fills those with values.
class TensorMaker {
 public:
  TensorMaker(const RunJob& job, const RunValues& values, std::vector<Buffer>& buffers)
      : job_(job), values_(values), buffers_(buffers) {}

  TensorView empty(DType dtype, Shape shape) {
    buffers_.emplace_back(shape.num_elements() * size_of(dtype));
    return buffers_.back().view(dtype, shape);
  }

  TensorView filled(Source source, int64_t first, Shape shape, DType dtype) {
    const TensorView view = empty(dtype, shape);
    values_.fill(source, first, view);
    return view;
  }

  void make_mlp(const MlpSources& mlp, ExpertWeights& weights, ExpertGradients& grads) {
    const int64_t D = job_.layer.router.width;
    const int64_t hidden = (is_gated(job_.layer.experts.activation) ? 2 : 1) * mlp.inner;
    const Shape w1{mlp.count, hidden, D};
    const Shape w2{mlp.count, D, mlp.inner};
    const Shape b1{mlp.count, hidden};
    const Shape b2{mlp.count, D};
    weights.w1 = filled(mlp.w1, mlp.first, w1, job_.dtype());
    weights.w2 = filled(mlp.w2, mlp.first, w2, job_.dtype());
    if (job_.with_biases) {
      weights.b1 = filled(mlp.b1, mlp.first, b1, job_.dtype());
      weights.b2 = filled(mlp.b2, mlp.first, b2, job_.dtype());
    }
    if (!job_.with_backward) return;
    grads.w1 = empty(job_.sum_dtype(), w1);
    grads.w2 = empty(job_.sum_dtype(), w2);
    if (!job_.with_biases) return;
    grads.b1 = empty(job_.sum_dtype(), b1);
    grads.b2 = empty(job_.sum_dtype(), b2);
  }

 private:
  const RunJob& job_;
  const RunValues& values_;
  std::vector<Buffer>& buffers_;
};

std::vector<ConstTensorView*> all_of(MoeLayerWeights& weights) {
  std::vector<ConstTensorView*> all = {&weights.gate.weight, &weights.gate.bias,
                                       &weights.expert_bias};
  for (ExpertWeights* mlp : {&weights.experts, &weights.shared}) {
    all.insert(all.end(), {&mlp->w1, &mlp->w2, &mlp->b1, &mlp->b2});
  }
  return all;
}

std::vector<TensorView*> all_of(MoeLayerGradients& grads) {
  std::vector<TensorView*> all = {&grads.gate, &grads.gate_bias};
  for (ExpertGradients* mlp : {&grads.experts, &grads.shared}) {
    all.insert(all.end(), {&mlp->w1, &mlp->w2, &mlp->b1, &mlp->b2});
  }
  return all;
}

}  // namespace

RunTensors::RunTensors(const RunTensors& host, RankDevice& device)
    : x(device.to_device(host.x.view)),
      grad_out(device.to_device(host.grad_out.view)),
      weights(host.weights),
      grads(host.grads) {
  for (ConstTensorView* view : all_of(weights)) {
    if (view->given()) *view = copies_.emplace_back(device.to_device(*view)).view;
  }
  for (TensorView* view : all_of(grads)) {
    if (view->given()) {
      *view = copies_.emplace_back(device.allocate(view->dtype, view->shape)).view;
    }
  }
}

void RunTensors::read_gradients(const RunTensors& other, RankDevice& device) const {
  MoeLayerGradients from = other.grads;
  MoeLayerGradients to = grads;
  const std::vector<TensorView*> sources = all_of(from);
  const std::vector<TensorView*> targets = all_of(to);
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i]->given()) device.read(*sources[i], *targets[i]);
  }
}

RunTensors::RunTensors(const RunJob& job, const RunValues& values, Group& group) {
  const int64_t D = job.layer.router.width;
  const int64_t E = job.layer.router.num_experts;
  TensorMaker make(job, values, buffers_);
  const Shape tokens{job.num_tokens(group.rank()), D};
  const int64_t first_token = job.first_token(group.rank());
  x.view = make.filled(Source::kX, first_token, tokens, job.dtype());
  grad_out.view = make.filled(Source::kGradOut, first_token, tokens, job.dtype());

  weights.gate.weight = make.filled(Source::kGate, 0, {E, D}, job.dtype());
  if (job.with_biases) weights.gate.bias = make.filled(Source::kGateBias, 0, {E}, job.dtype());
  if (job.with_expert_bias) {
    weights.expert_bias = make.filled(Source::kExpertBias, 0, {E}, job.sum_dtype());
  }
  if (job.with_backward) {
    grads.gate = make.empty(job.sum_dtype(), {E, D});
    if (job.with_biases) grads.gate_bias = make.empty(job.sum_dtype(), {E});
  }

  const int64_t first = first_expert(E, group.size(), group.rank());
  const int64_t count = first_expert(E, group.size(), group.rank() + 1) - first;
  make.make_mlp(
      {Source::kW1, Source::kW2, Source::kB1, Source::kB2, first, count, job.layer.experts.inner},
      weights.experts, grads.experts);
  if (job.layer.shared_inner == 0) return;
  make.make_mlp({Source::kSharedW1, Source::kSharedW2, Source::kSharedB1, Source::kSharedB2, 0, 1,
                 job.layer.shared_inner},
                weights.shared, grads.shared);
}

}  // namespace crossdock::cli
