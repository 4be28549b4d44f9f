#include "experts/shared_experts.hpp"

#include "ops/cuda/device_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

ExpertsConfig as_one_expert(ExpertsConfig config) {
  config.num_local_experts = 1;
  config.weights_in = WeightsIn::kCombine;
  return config;
}

// All tokens as one segment, on the device of the tokens.
class AllRows {
 public:
  AllRows(const ConstTensorView& x, const SharedExperts::OnDevice& device)
      : in_host_memory_(x.num_rows()), segments_(in_host_memory_.view()) {
    if (x.device.is_cpu()) return;
    segments_ = ops::write_segment_on_device(x.num_rows(), device.segment, device.stream);
  }

  const Segments& segments() const { return segments_; }

 private:
  OneSegment in_host_memory_;
  Segments segments_;
};

}  // namespace

SharedExperts::SharedExperts(ExpertsConfig config, std::shared_ptr<ThreadPool> pool)
    : pool_(pool ? std::move(pool) : ThreadPool::process_wide()),
      experts_(as_one_expert(config), pool_) {}

ExpertsSaved SharedExperts::forward(const ForwardArgs& args) const {
  const AllRows all(args.x, args.device);
  return experts_.forward({.weights = args.weights,
                           .rows = args.x,
                           .segments = all.segments(),
                           .row_weights = {},
                           .y = args.y,
                           .stream = args.device.stream,
                           .free_sms = args.device.free_sms});
}

void SharedExperts::backward_dx(const BackwardDxArgs& args) const {
  const AllRows all(args.x, args.device);
  experts_.backward_dx({.weights = args.weights,
                        .rows = args.x,
                        .segments = all.segments(),
                        .row_weights = {},
                        .grad_y = args.grad_out,
                        .saved = args.saved,
                        .grad_rows = args.grad_x,
                        .grad_row_weights = {},
                        .stream = args.device.stream,
                        .free_sms = args.device.free_sms});
}

void SharedExperts::backward_dw(const BackwardDwArgs& args) const {
  const AllRows all(args.x, args.device);
  experts_.backward_dw({.rows = args.x,
                        .segments = all.segments(),
                        .row_weights = {},
                        .grad_y = args.grad_out,
                        .saved = args.saved,
                        .grads = args.grads,
                        .accumulate = args.accumulate,
                        .stream = args.device.stream});
}

void SharedExperts::add(ConstTensorView term, TensorView sum, Stream stream) const {
  const ops::AddArgs args{.term = term, .sum = sum};
  if (sum.device.is_cpu()) return ops::add(args, *pool_);
  ops::add_on_device(args, stream);
}

}  // namespace crossdock
