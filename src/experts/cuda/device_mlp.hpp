#pragma once

#include "core/cuda/device_calls.hpp"
#include "experts/backend.hpp"
#include "ops/activation.hpp"
#include "ops/cuda/grouped_product.hpp"

namespace crossdock::experts {

/// Experts on one GPU, for rows in fp32, bf16 or fp16: grouped products and the steps between them.
///
/// Memory is allocated for all R rows of the tensors, because only the GPU knows how many are used.
/// A call's scratch memory returns to the pool when the call returns; the pool reuses it in stream
/// order. Scratch memory of a captured call stays with the graph.
class DeviceMlp final : public Backend {
 public:
  DeviceMlp(const ExpertsConfig& config, Device device);

  void prepare(Stream stream) override { const cuda::DeviceCall call(calls_, stream); }
  ExpertsSaved begin_forward(const ExpertsForwardArgs& args) override;
  void forward(const ExpertsForwardArgs& args, ExpertsSaved& saved) override;
  void begin_backward_dx(const ExpertsBackwardDxArgs& args) override;
  void backward_dx(const ExpertsBackwardDxArgs& args) override;
  void backward_dw(const ExpertsBackwardDwArgs& args) override;

 private:
  bool weights_in_experts() const { return config_.weights_in == WeightsIn::kExperts; }
  /// Whether the first product applies the activation itself.
  bool fuses_activation() const;
  /// Memory for [num_rows, width].
  Buffer take(const cuda::DeviceCall& call, int64_t num_rows, int64_t width);
  TensorView view(const Buffer& buffer, int64_t num_rows, int64_t width) const;
  /// Args: ExpertsForwardArgs or ExpertsBackwardDxArgs.
  template <typename Args>
  void compute_hidden(const cuda::DeviceCall& call, const Args& args, const TensorView& hidden);
  void compute_activation(const cuda::DeviceCall& call, const ExpertsForwardArgs& args,
                          const ExpertsSaved& saved, const TensorView& activation);

  Device device_;
  int64_t F_;
  int64_t H_;  // 2F or F
  ExpertsConfig config_;
  ops::ActivationSpec activation_;
  cuda::DeviceCalls calls_;
  ops::GroupedProducts products_;
};

}  // namespace crossdock::experts
