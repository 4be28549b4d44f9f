#include "experts/shared_experts.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "ops/convert.hpp"
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

namespace {

constexpr int64_t kChunk = 16384;  // elements that a thread rounds at a time

template <typename T>
void round_typed(const ConstTensorView& sums, const TensorView& out, ThreadPool& pool) {
  const int64_t count = out.num_elements();
  pool.parallel_for((count + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t first = chunk * kChunk;
    ops::narrow_row(pointer<float>(sums) + first, std::min(kChunk, count - first),
                    pointer<T>(out) + first);
  });
}

}  // namespace

void round_sums(const ConstTensorView& sums, const TensorView& out, ThreadPool& pool,
                Stream stream) {
  CROSSDOCK_ASSERT(sums.dtype == DType::kF32 && sums.shape == out.shape);
  if (!out.device.is_cpu()) return ops::round_on_device(sums, out, stream);
  if (out.dtype == DType::kBF16) return round_typed<BF16>(sums, out, pool);
  CROSSDOCK_ASSERT(out.dtype == DType::kF16);
  round_typed<F16>(sums, out, pool);
}

}  // namespace crossdock
