#pragma once

#include <memory>
#include <string>

#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/testing/tensor_place.hpp"
#include "dispatch/cuda/tensors.hpp"

namespace crossdock::conformance {

/// A rank's tensors on its GPU.
inline TensorPlace gpu_place(Group& group) {
  const auto stream = std::make_shared<const RankStream>(group);
  // A copy queued behind kernels that wait for other ranks could keep them from launching theirs.
  const auto copy = [stream](const TensorView& to, const ConstTensorView& from) {
    stream->synchronize();
    cuda_ok(cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(from.num_bytes()),
                            cudaMemcpyDefault, stream->get()));
    stream->synchronize();
  };
  return {.to_device =
              [=](const ConstTensorView& host) {
                OwnedTensor made = device_tensor(host.dtype, host.shape, *stream);
                copy(made.view, host);
                return made;
              },
          .to_host =
              [=](const ConstTensorView& tensor) {
                const Buffer buffer(tensor.num_bytes());
                OwnedTensor made{.view = buffer.view(tensor.dtype, tensor.shape),
                                 .owner = buffer.owner()};
                copy(made.view, tensor);
                return made;
              },
          .device = stream->device(),
          .stream = stream->view()};
}

/// A built-in strategy whose checks have their tensors on GPUs.
inline std::unique_ptr<Strategy> strategy_on_gpu(const std::string& name) {
  return on_device(make_strategy(name), gpu_place);
}

}  // namespace crossdock::conformance
