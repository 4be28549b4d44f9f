#include "bench/kernels/activation_step.hpp"

#include <memory>

#include "bench/cuda_memory.hpp"
#include "ops/cuda/device_activation.hpp"

namespace crossdock::bench {
namespace {

struct ActivationTensors {
  OwnedTensor hidden, grad_hidden;                   // [R, 2F]
  OwnedTensor grad_activation, weighted_activation;  // [R, F]
  OwnedTensor row_weights, grad_row_weights;         // [R] fp32

  ActivationTensors(int64_t R, int64_t F, cudaStream_t stream)
      : hidden(random_tensor({R, 2 * F}, stream)),
        grad_hidden(device_tensor(DType::kBF16, {R, 2 * F}, stream)),
        grad_activation(random_tensor({R, F}, stream)),
        weighted_activation(device_tensor(DType::kBF16, {R, F}, stream)),
        row_weights(device_tensor(DType::kF32, {R}, stream)),
        grad_row_weights(device_tensor(DType::kF32, {R}, stream)) {
    const std::vector<float> weights(static_cast<size_t>(R), 0.125f);
    check_cuda(cudaMemcpyAsync(row_weights.view.data, weights.data(),
                               weights.size() * sizeof(float), cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
};

}  // namespace

std::function<void()> make_activation_backward(const Scenario& s, const Segments& segments,
                                               cudaStream_t stream) {
  const auto tensors =
      std::make_shared<const ActivationTensors>(s.tokens * s.top_k, s.inner, stream);
  return [tensors, segments, F = s.inner, stream] {
    ops::activate_backward_on_device({.spec = {.kind = Activation::kSwiglu, .F = F},
                                      .hidden = tensors->hidden.view,
                                      .row_weights = tensors->row_weights.view,
                                      .grad_activation = tensors->grad_activation.view,
                                      .grad_y = {},
                                      .b2 = {},
                                      .segments = segments,
                                      .grad_hidden = tensors->grad_hidden.view,
                                      .weighted_activation = tensors->weighted_activation.view,
                                      .grad_row_weights = tensors->grad_row_weights.view},
                                     {stream});
  };
}

}  // namespace crossdock::bench
