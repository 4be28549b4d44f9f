#include "dispatch/cuda/host_staging.hpp"

#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

/// What the host is shown of a plan on the device: copies of its arrays.
class StagedPlan final : public DevicePlanData {
 public:
  StagedPlan(Plan device_plan, std::shared_ptr<const OwnedStream> owned_stream)
      : stream_(std::move(owned_stream)), device_plan_(std::move(device_plan)) {
    const cudaStream_t stream = stream_->get();
    const Segments segments = device_plan_.segments();
    const ConstTensorView weights = device_plan_.weights();
    starts_.resize(static_cast<size_t>(segments.num_segments + 1));
    counts_.resize(static_cast<size_t>(segments.num_segments));
    weights_.resize(static_cast<size_t>(weights.num_elements()));
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream));  // see download
    copy_out(starts_, segments.starts, stream);
    copy_out(counts_, segments.counts, stream);
    copy_out(weights_, weights.data, stream);
    CROSSDOCK_CUDA(cudaStreamSynchronize(stream));
    dropped_.assign(device_plan_.dropped().begin(), device_plan_.dropped().end());
    weights_shape_ = weights.shape;
  }

  const Plan& device_plan() const { return device_plan_; }

  Device device() const override { return {}; }
  int64_t num_rows() const override { return starts_.back(); }
  int64_t capacity_rows() const override { return starts_.back(); }
  Segments segments() const override {
    return {.starts = starts_.data(),
            .counts = counts_.data(),
            .num_segments = std::ssize(counts_),
            .device = {}};
  }
  ConstTensorView weights() const override { return {weights_.data(), weights_shape_}; }
  std::span<const int64_t> dropped() const override { return dropped_; }

 private:
  template <typename T>
  static void copy_out(std::vector<T>& to, const void* from, cudaStream_t stream) {
    if (to.empty()) return;
    CROSSDOCK_CUDA(
        cudaMemcpyAsync(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost, stream));
  }

  std::shared_ptr<const OwnedStream> stream_;  // outlives the plan's memory
  Plan device_plan_;
  std::vector<int64_t> starts_;
  std::vector<int64_t> counts_;
  std::vector<int64_t> dropped_;
  std::vector<float> weights_;
  Shape weights_shape_;
};

const Plan& device_plan(const Plan& plan) {
  return static_cast<const StagedPlan&>(*plan.device_data()).device_plan();
}

Shape with_rows(const Shape& shape, int64_t num_rows) {
  return shape.rank() > 1 ? Shape{num_rows, shape[1]} : Shape{num_rows};
}

}  // namespace

HostStaging::HostStaging(std::unique_ptr<DevicePath> path, Group& group, int device)
    : group_(group),
      stream_(lease_stream(device)),
      pool_(DeviceArena::make(device, /*is_exported=*/false)),
      path_(std::move(path)) {
  set_options({});
}

HostStaging::~HostStaging() = default;

void HostStaging::set_options(const DeviceOptions& options) {
  DeviceOptions own = options;
  own.stream = stream_->view();
  path_->set_options(own);
}

// A tensor that is not as it must be goes on as it is: the device path names what is wrong.
OwnedTensor HostStaging::upload(const ConstTensorView& tensor) {
  OwnedTensor copy;
  if (!tensor.given()) return copy;
  const Buffer buffer = pool_.take(tensor.num_bytes(), stream_->get());
  copy = {.view = buffer.view(tensor.dtype, tensor.shape), .owner = buffer.owner()};
  if (tensor.data == nullptr) {
    copy.view.data = nullptr;
  } else if (tensor.num_bytes() > 0) {
    CROSSDOCK_CUDA(cudaMemcpyAsync(buffer.data(), tensor.data,
                                   static_cast<size_t>(tensor.num_bytes()), cudaMemcpyHostToDevice,
                                   stream_->get()));
  }
  return copy;
}

// The device's tensors of rows have as many as its plan may have.
OwnedTensor HostStaging::upload_rows(const Plan& plan, const ConstTensorView& rows) {
  const int64_t capacity = device_plan(plan).capacity_rows();
  if (rows.num_rows() != plan.num_rows() || rows.shape.rank() == 0) return upload(rows);
  const Shape shape = with_rows(rows.shape, capacity);
  const Buffer buffer = pool_.take(shape.num_elements() * size_of(rows.dtype), stream_->get());
  if (rows.num_bytes() > 0) {
    CROSSDOCK_CUDA(cudaMemcpyAsync(buffer.data(), rows.data, static_cast<size_t>(rows.num_bytes()),
                                   cudaMemcpyHostToDevice, stream_->get()));
  }
  return {.view = buffer.view(rows.dtype, shape), .owner = buffer.owner()};
}

OwnedTensor HostStaging::download(const ConstTensorView& tensor, int64_t num_rows,
                                  const TensorView& given) {
  OwnedTensor copy{.view = given, .owner = nullptr};
  const Shape shape = with_rows(tensor.shape, num_rows);
  if (!given.given()) {
    const Buffer buffer = group_.pool().take(shape.num_elements() * size_of(tensor.dtype));
    copy = {.view = buffer.view(tensor.dtype, shape), .owner = buffer.owner()};
  }
  // A copy that waits for kernels, which wait for other ranks, could keep those from launching.
  CROSSDOCK_CUDA(cudaStreamSynchronize(stream_->get()));
  if (copy.view.num_bytes() > 0) {
    CROSSDOCK_CUDA(cudaMemcpyAsync(copy.view.data, tensor.data,
                                   static_cast<size_t>(copy.view.num_bytes()),
                                   cudaMemcpyDeviceToHost, stream_->get()));
  }
  CROSSDOCK_CUDA(cudaStreamSynchronize(stream_->get()));
  return copy;
}

Plan HostStaging::finish(const Plan& device_plan) {
  auto staged = std::make_shared<const StagedPlan>(device_plan, stream_);
  path_->check();  // the device is done: a refused routing is known on all ranks
  return device_plan.with_device_data(std::move(staged));
}

Plan HostStaging::plan(const Routing& routing, const PlanOnHost& plan_on_host) {
  const OwnedTensor expert_ids = upload(routing.expert_ids);
  const OwnedTensor weights = upload(routing.weights);
  const OwnedTensor mask = upload(routing.mask);
  return finish(path_->plan(Routing{expert_ids.view, weights.view, mask.view}, plan_on_host));
}

Plan HostStaging::plan(const DenseRouting& routing, const PlanDenseOnHost& plan_on_host) {
  const OwnedTensor map = upload(routing.map);
  const OwnedTensor weights = upload(routing.weights);
  const OwnedTensor mask = upload(routing.mask);
  return finish(path_->plan(DenseRouting{map.view, weights.view, mask.view}, plan_on_host));
}

DispatchResult HostStaging::dispatch(const Plan& plan, const DispatchArgs& args) {
  const OwnedTensor x = upload(args.x);
  const OwnedTensor scales = upload(args.scales);
  const OwnedTensor rows = upload_rows(plan, args.rows);
  const OwnedTensor row_scales = upload_rows(plan, args.row_scales);
  const DispatchResult moved =
      path_->dispatch(device_plan(plan), {.x = x.view,
                                          .scales = scales.view,
                                          .rows = rows.view,
                                          .row_scales = row_scales.view,
                                          .with_row_weights = args.with_row_weights});
  const int64_t R = plan.num_rows();
  DispatchResult result;
  result.rows = download(moved.rows.view, R, args.rows);
  if (args.scales.given()) {
    result.row_scales = download(moved.row_scales.view, R, args.row_scales);
  }
  if (args.with_row_weights) result.row_weights = download(moved.row_weights.view, R, {});
  return result;
}

OwnedTensor HostStaging::sum_rows(const char* operation, const Plan& plan,
                                  const GatherSumArgs& args) {
  const OwnedTensor rows = upload_rows(plan, args.rows);
  const OwnedTensor out = upload(args.out);
  const ConstTensorView weights =
      args.weights.given() ? device_plan(plan).weights() : ConstTensorView{};
  const OwnedTensor sum = path_->sum_rows(operation, device_plan(plan),
                                          {.rows = rows.view, .weights = weights, .out = out.view});
  return download(sum.view, plan.num_tokens(), args.out);
}

CombineBackwardResult HostStaging::combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                    ConstTensorView y) {
  const OwnedTensor gradient = upload(grad_out);
  const OwnedTensor rows = upload_rows(plan, y);
  const CombineBackwardResult moved =
      path_->combine_backward(device_plan(plan), gradient.view, rows.view);
  return {.grad_rows = download(moved.grad_rows.view, plan.num_rows(), {}),
          .grad_weights = download(moved.grad_weights.view, plan.num_tokens(), {})};
}

OwnedTensor HostStaging::collect_routes(const Plan& plan, ConstTensorView rows) {
  const OwnedTensor values = upload_rows(plan, rows);
  const OwnedTensor routes = path_->collect_routes(device_plan(plan), values.view);
  return download(routes.view, plan.num_tokens(), {});
}

OwnedTensor HostStaging::allocate_rows(const Plan& plan, DType dtype) {
  const Shape shape{plan.num_rows(), plan.data().config->width};
  const Buffer buffer = group_.pool().take(shape.num_elements() * size_of(dtype));
  return {.view = buffer.view(dtype, shape), .owner = buffer.owner()};
}

}  // namespace crossdock::cuda
