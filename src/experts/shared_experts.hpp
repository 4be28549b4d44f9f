#pragma once

#include <memory>

#include "crossdock/experts.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {

/// A dense MLP in addition to the routed experts, applied to each rank's own tokens without any
/// exchange. Bits, thread safety, checks and devices are as in Experts.
class SharedExperts {
 public:
  /// Overrides num_local_experts and weights_in: one expert, no weights.
  SharedExperts(ExpertsConfig config, std::shared_ptr<ThreadPool> pool);

  const Experts& experts() const { return experts_; }

  /// Additional arguments of a call on a GPU.
  struct OnDevice {
    Stream stream;
    TensorView segment;  // [3] int64, in use until the stream has completed the call
    int free_sms = 0;    // as in ExpertsForwardArgs
  };

  /// y [T, D] = MLP(x [T, D])
  struct ForwardArgs {
    ExpertWeights weights;
    ConstTensorView x;  // [T, D]
    TensorView y;       // out [T, D]
    OnDevice device{};
  };
  ExpertsSaved forward(const ForwardArgs& args) const;

  /// Computes grad_x [T, D] and prepares `saved` for backward_dw.
  struct BackwardDxArgs {
    ExpertWeights weights;
    ConstTensorView x;         // [T, D]
    ConstTensorView grad_out;  // [T, D]
    ExpertsSaved* saved = nullptr;
    TensorView grad_x;  // out [T, D]
    OnDevice device{};
  };
  void backward_dx(const BackwardDxArgs& args) const;

  struct BackwardDwArgs {
    ConstTensorView x;         // [T, D]
    ConstTensorView grad_out;  // [T, D]
    const ExpertsSaved* saved = nullptr;
    ExpertGradients grads;
    bool accumulate = false;
    OnDevice device{};
  };
  void backward_dw(const BackwardDwArgs& args) const;

  /// sum += term, rounded once; both [T, D] of one dtype and device.
  void add(ConstTensorView term, TensorView sum, Stream stream = {}) const;

 private:
  std::shared_ptr<ThreadPool> pool_;
  Experts experts_;
};

/// out = sums, rounded once: sums [T, D] in fp32, out in bf16 or fp16, in host memory or on one
/// GPU.
void round_sums(const ConstTensorView& sums, const TensorView& out, ThreadPool& pool,
                Stream stream = {});

}  // namespace crossdock
