#include "bench/cuda_layer_tensors.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "bench/cuda_memory.hpp"
#include "bench/layer_values.hpp"
#include "crossdock/error.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/testing/reference_router.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::bench {
namespace {

using Values = std::vector<double>;

// Hidden rows, activations, results and gradients are rounded to bf16, some of them twice.
constexpr double kTolerance = 0.03;

OwnedTensor bf16_tensor(const std::vector<float>& values, const Shape& shape, cudaStream_t stream) {
  std::vector<BF16> rounded(values.size());
  std::ranges::transform(values, rounded.begin(), to_bf16);
  OwnedTensor tensor = to_device({rounded.data(), shape}, stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return tensor;
}

// One matrix [N, K] per expert, from a function of the expert.
OwnedTensor expert_tensor(const Shape& shape,
                          const std::function<std::vector<float>(int64_t)>& values,
                          cudaStream_t stream) {
  const Buffer rounded(shape.num_elements() * size_of(DType::kBF16));
  const TensorView all = rounded.view(DType::kBF16, shape);
  ThreadPool::process_wide()->parallel_for(shape[0], [&](int64_t e) {
    const std::vector<float> one = values(e);
    BF16* to = all.as<BF16>().data() + e * static_cast<int64_t>(one.size());
    std::ranges::transform(one, to, to_bf16);
  });
  OwnedTensor tensor = to_device(all, stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return tensor;
}

Values as_bf16(const std::vector<float>& values) {
  Values rounded(values.size());
  std::ranges::transform(values, rounded.begin(),
                         [](float value) { return to_float(to_bf16(value)); });
  return rounded;
}

Values row_of(const Values& all, int64_t row, int64_t width) {
  return {all.begin() + row * width, all.begin() + (row + 1) * width};
}

void add(const Values& term, Values& sum) {
  for (size_t i = 0; i < term.size(); ++i) sum[i] += term[i];
}

void compare(const std::string& name, const Values& got, const Values& wanted) {
  double scale = 0.0;
  for (const double value : wanted) scale = std::max(scale, std::abs(value));
  for (size_t d = 0; d < wanted.size(); ++d) {
    if (std::abs(got[d] - wanted[d]) <= kTolerance * scale) continue;
    throw Error(ErrorCode::kInternal, "the layer's " + name + " is wrong in column " +
                                          std::to_string(d) + ": " + std::to_string(got[d]) +
                                          " instead of " + std::to_string(wanted[d]));
  }
}

}  // namespace

MoeLayerConfig cuda_layer_config(const Scenario& s) {
  MoeLayerConfig config;
  config.router.num_experts = s.experts;
  config.router.top_k = s.top_k;
  config.router.width = s.width;
  config.router.dtype = s.dtype;
  config.router.normalise = true;
  config.experts.inner = s.inner;
  config.experts.dtype = s.dtype;
  config.dispatch.max_rows = s.tokens * s.top_k;
  config.strategy = "direct";
  config.overlap_chunks = s.overlap_chunks;
  config.allow_equal_tokens = true;  // comparing tokens is not part of what is measured
  return config;
}

CudaLayerTensors::CudaLayerTensors(const Scenario& s, cudaStream_t stream)
    : x(bf16_tensor(values_of_x(s, 0), {s.tokens, s.width}, stream)),
      grad_out(bf16_tensor(values_of_grad_out(s, 0), {s.tokens, s.width}, stream)),
      gate(bf16_tensor(values_of_gate(s), {s.experts, s.width}, stream)),
      w1(expert_tensor(
          {s.experts, 2 * s.inner, s.width}, [&](int64_t e) { return values_of_w1(s, e); },
          stream)),
      w2(expert_tensor(
          {s.experts, s.width, s.inner}, [&](int64_t e) { return values_of_w2(s, e); }, stream)),
      out(device_tensor(s.dtype, {s.tokens, s.width}, stream)),
      grad_x(device_tensor(s.dtype, {s.tokens, s.width}, stream)),
      grad_gate(device_tensor(DType::kF32, {s.experts, s.width}, stream)),
      grad_w1(device_tensor(s.dtype, w1.view.shape, stream)),
      grad_w2(device_tensor(s.dtype, w2.view.shape, stream)) {}

MoeLayerWeights CudaLayerTensors::weights() const {
  return {.gate = {.weight = gate.view}, .experts = {.w1 = w1.view, .w2 = w2.view}};
}

MoeLayerGradients CudaLayerTensors::grads() const {
  return {.gate = grad_gate.view, .experts = {.w1 = grad_w1.view, .w2 = grad_w2.view}};
}

void check_layer(const Scenario& s, const CudaLayerTensors& tensors, const RouterOutput& routes,
                 cudaStream_t stream) {
  const OwnedTensor ids = to_host(routes.routing().expert_ids, s.tokens, stream);
  const Values out = reference::to_values(to_host(tensors.out.view, s.tokens, stream));
  const Values grad_x = reference::to_values(to_host(tensors.grad_x.view, s.tokens, stream));
  const Values x = as_bf16(values_of_x(s, 0));
  const Values grad_out = as_bf16(values_of_grad_out(s, 0));
  const reference::MlpConfig mlp{.D = s.width, .F = s.inner};
  for (const int64_t t : {int64_t{0}, s.tokens - 1}) {
    reference::RouterInput input{.config = cuda_layer_config(s).router,
                                 .T = 1,
                                 .x = row_of(x, t, s.width),
                                 .gate = as_bf16(values_of_gate(s))};
    const auto chosen = ids.view.as<int32_t>().subspan(static_cast<size_t>(t * s.top_k));
    input.forced_ids.assign(chosen.begin(), chosen.begin() + s.top_k);
    const reference::RouterResult weights = reference::route(input);
    const Values grad = row_of(grad_out, t, s.width);
    Values wanted_out(grad.size());
    Values wanted_grad_x(grad.size());
    Values grad_weights;
    for (size_t k = 0; k < input.forced_ids.size(); ++k) {
      const int64_t e = input.forced_ids[k];
      const reference::MlpWeights expert{.w1 = as_bf16(values_of_w1(s, e)),
                                         .w2 = as_bf16(values_of_w2(s, e))};
      const Values weight = {weights.weights[k]};
      add(reference::mlp_forward(mlp, expert, input.x, weight), wanted_out);
      const auto grads = reference::mlp_backward(mlp, expert, input.x, weight, grad);
      add(grads.rows, wanted_grad_x);
      grad_weights.push_back(grads.row_weights[0]);
    }
    add(reference::route_backward(input, weights, grad_weights, weights.counts).x, wanted_grad_x);
    const std::string of_token = " of token " + std::to_string(t);
    compare("out" + of_token, row_of(out, t, s.width), wanted_out);
    compare("grad_x" + of_token, row_of(grad_x, t, s.width), wanted_grad_x);
  }
}

}  // namespace crossdock::bench
