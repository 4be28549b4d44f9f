#include <utility>

#include "core/cuda/device_pool.hpp"
#include "experts/backend.hpp"
#include "ops/activation.hpp"
#include "ops/cuda/device_activation.hpp"
#include "ops/cuda/device_rows.hpp"
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

// The products of a call do not write unused rows, because they may cover only some of the
// segments; begin_forward and begin_backward_dx zero the unused rows of the outputs.

DeviceMlp::DeviceMlp(const ExpertsConfig& config, Device device)
    : device_(device),
      F_(config.inner),
      H_(config.hidden_width()),
      config_(config),
      activation_{config.activation, config.interleaved, config.limit, config.inner},
      calls_(device.index),
      products_(device) {
  ops::load_device_activation(config.activation, config.dtype, device);
  ops::load_device_segments(config.dtype, device);
}

bool DeviceMlp::fuses_activation() const {
  return config_.activation == Activation::kSwiglu && !weights_in_experts();
}

Buffer DeviceMlp::take(const cuda::DeviceCall& call, int64_t num_rows, int64_t width) {
  return call.take(num_rows * width * size_of(config_.dtype));
}

TensorView DeviceMlp::view(const Buffer& buffer, int64_t num_rows, int64_t width) const {
  return buffer.view(config_.dtype, {num_rows, width});
}

// hidden = W1 x + b1
template <typename Args>
void DeviceMlp::compute_hidden(const cuda::DeviceCall& call, const Args& args,
                               const TensorView& hidden) {
  products_.forward({.x = args.rows,
                     .w = args.weights.w1,
                     .bias = args.weights.b1,
                     .segments = args.segments,
                     .out = hidden,
                     .zero_unused_rows = false,
                     .free_sms = args.free_sms},
                    call.stream());
}

// activation = act(W1 x + b1), times the row's weight if the experts apply it. Fills saved.hidden
// unless it is recomputed.
void DeviceMlp::compute_activation(const cuda::DeviceCall& call, const ExpertsForwardArgs& args,
                                   const ExpertsSaved& saved, const TensorView& activation) {
  const int64_t R = args.rows.num_rows();
  if (fuses_activation()) {
    using Epilogue = ops::ProductEpilogue;
    products_.forward(
        {.x = args.rows,
         .w = args.weights.w1,
         .bias = args.weights.b1,
         .segments = args.segments,
         .out = activation,
         .hidden = config_.recompute ? TensorView() : view(saved.hidden, R, H_),
         .epilogue = config_.recompute ? Epilogue::kSwiglu : Epilogue::kSwigluKeepHidden,
         .interleaved = config_.interleaved,
         .zero_unused_rows = false,
         .free_sms = args.free_sms},
        call.stream());
    return;
  }
  const Buffer own = config_.recompute ? take(call, R, H_) : Buffer();
  const TensorView hidden = view(config_.recompute ? own : saved.hidden, R, H_);
  compute_hidden(call, args, hidden);
  ops::activate_on_device(
      {.spec = activation_,
       .hidden = hidden,
       .row_weights = weights_in_experts() ? args.row_weights : ConstTensorView(),
       .segments = args.segments,
       .activation = activation},
      call.stream());
}

ExpertsSaved DeviceMlp::begin_forward(const ExpertsForwardArgs& args) {
  const cuda::DeviceCall call(calls_, args.stream);
  ops::zero_unused_rows_on_device({.tensors = {args.y}, .segments = args.segments}, call.stream());
  ExpertsSaved saved;
  if (!config_.recompute) saved.hidden = take(call, args.rows.num_rows(), H_);
  return saved;
}

void DeviceMlp::forward(const ExpertsForwardArgs& args, ExpertsSaved& saved) {
  const cuda::DeviceCall call(calls_, args.stream);
  const int64_t R = args.rows.num_rows();
  const Buffer memory = take(call, R, F_);
  const TensorView activation = view(memory, R, F_);
  compute_activation(call, args, saved, activation);
  const bool scales_b2 = weights_in_experts() && args.weights.b2.given();
  products_.forward({.x = activation,
                     .w = args.weights.w2,
                     .bias = scales_b2 ? ConstTensorView() : args.weights.b2,
                     .segments = args.segments,
                     .out = args.y,
                     .zero_unused_rows = false,
                     .free_sms = args.free_sms},
                    call.stream());
  if (!scales_b2) return;
  ops::add_weighted_bias_on_device({.bias = args.weights.b2,
                                    .row_weights = args.row_weights,
                                    .segments = args.segments,
                                    .rows = args.y},
                                   call.stream());
}

// Each result overwrites its input: grad_hidden the hidden rows, the weighted activation W2^T g.
void DeviceMlp::begin_backward_dx(const ExpertsBackwardDxArgs& args) {
  const cuda::DeviceCall call(calls_, args.stream);
  ops::zero_unused_rows_on_device(
      {.tensors = {args.grad_rows, args.grad_row_weights}, .segments = args.segments},
      call.stream());
  const int64_t R = args.grad_y.num_rows();
  ExpertsSaved& saved = *args.saved;
  saved.weighted_activation = take(call, R, F_);
  saved.grad_hidden = config_.recompute ? take(call, R, H_) : std::exchange(saved.hidden, Buffer());
}

void DeviceMlp::backward_dx(const ExpertsBackwardDxArgs& args) {
  const cuda::DeviceCall call(calls_, args.stream);
  const int64_t R = args.grad_y.num_rows();
  const TensorView hidden = view(args.saved->grad_hidden, R, H_);
  const TensorView grad_activation = view(args.saved->weighted_activation, R, F_);
  if (config_.recompute) compute_hidden(call, args, hidden);
  products_.dx({.grad = args.grad_y,
                .w = args.weights.w2,
                .segments = args.segments,
                .out = grad_activation,
                .zero_unused_rows = false,
                .free_sms = args.free_sms},
               call.stream());
  ops::activate_backward_on_device(
      {.spec = activation_,
       .hidden = hidden,
       .row_weights = args.row_weights,
       .grad_activation = grad_activation,
       .grad_y = args.grad_y,
       .b2 = args.weights.b2,
       .segments = args.segments,
       .grad_hidden = hidden,
       .weighted_activation = args.keep_for_dw ? grad_activation : TensorView(),
       .grad_row_weights = args.grad_row_weights},
      call.stream());
  products_.dx({.grad = hidden,
                .w = args.weights.w1,
                .segments = args.segments,
                .out = args.grad_rows,
                .zero_unused_rows = false,
                .free_sms = args.free_sms},
               call.stream());
}

void DeviceMlp::backward_dw(const ExpertsBackwardDwArgs& args) {
  const cuda::DeviceCall call(calls_, args.stream);
  const int64_t R = args.grad_y.num_rows();
  const TensorView grad_hidden = view(args.saved->grad_hidden, R, H_);
  const auto multiply = [&](const ConstTensorView& grad, const ConstTensorView& x,
                            const TensorView& out) {
    if (!out.given()) return;
    products_.dw({.grad = grad,
                  .x = x,
                  .segments = args.segments,
                  .out = out,
                  .accumulate = args.accumulate},
                 call.stream());
  };
  const auto sum = [&](const ConstTensorView& rows, const ConstTensorView& row_weights,
                       const TensorView& sums) {
    if (!sums.given()) return;
    ops::sum_segments_on_device({.rows = rows,
                                 .row_weights = row_weights,
                                 .segments = args.segments,
                                 .sums = sums,
                                 .accumulate = args.accumulate},
                                call.stream());
  };
  multiply(grad_hidden, args.rows, args.grads.w1);
  multiply(args.grad_y, view(args.saved->weighted_activation, R, F_), args.grads.w2);
  sum(grad_hidden, {}, args.grads.b1);
  sum(args.grad_y, args.row_weights, args.grads.b2);
}

std::unique_ptr<Backend> make_device_backend(const ExpertsConfig& config, Device device) {
  return std::make_unique<DeviceMlp>(config, device);
}

}  // namespace crossdock::experts
