#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/call.hpp"
#include "dispatch/path.hpp"

namespace crossdock::cuda {

/// Runs calls with host tensors on a GPU path: every call copies its inputs to the GPU, waits, and
/// copies the results back. For checking GPU results with programs that only use host memory.
class HostTensors final : public Path {
 public:
  HostTensors(std::unique_ptr<Path> path, Group& group, int device);

  /// Ignores options.stream, since this path has its own; uses the other options.
  void set_options(const DeviceOptions& options) override;
  Plan plan(const Routing& routing) override;
  Plan plan(const DenseRouting& routing) override;
  /// Begun calls are complete when they return.
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args, Begun* begun) override;
  OwnedTensor gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args,
                         Begun* begun) override;
  CombineBackwardResult combine_backward(const Plan& plan,
                                         const CombineBackwardArgs& args) override;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) override;
  void agree_on(const Proposal& proposal) override { path_->agree_on(proposal); }
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) override;
  void finish(const std::shared_ptr<const void>& /*done*/) override {}
  void check() override { path_->check(); }
  void await() override { path_->await(); }

 private:
  /// Copies a call's inputs before the call. A failure here is this rank's refusal.
  void copy_in(const char* operation, const Plan* plan, const std::function<void()>& uploads);
  OwnedTensor upload(const ConstTensorView& tensor);
  OwnedTensor upload_rows(const Plan& plan, const ConstTensorView& rows);
  OwnedTensor upload_as(const Shape& shape, const ConstTensorView& tensor);
  OwnedTensor download(const ConstTensorView& tensor, int64_t num_rows, const TensorView& given);
  template <typename AnyRouting>
  Plan plan_copy(const ConstTensorView& routes, const AnyRouting& routing);
  Plan copy_out(const Plan& device_plan);

  Group& group_;
  std::shared_ptr<const OwnedStream> stream_;  // plans also keep it alive
  DevicePool pool_;
  std::unique_ptr<Path> path_;
};

namespace {

/// A device's plan as the host sees it: copies of its arrays.
class CopiedPlan final : public DevicePlanData {
 public:
  /// `path` made the plan and queues its work in the stream.
  CopiedPlan(Plan device_plan, std::shared_ptr<const OwnedStream> owned_stream, Path& path)
      : stream_(std::move(owned_stream)), device_plan_(std::move(device_plan)) {
    const RelaxedCapture relaxed;
    const cudaStream_t stream = stream_->get();
    const Segments segments = device_plan_.segments();
    const ConstTensorView weights = device_plan_.weights();
    starts_.resize(static_cast<size_t>(segments.num_segments + 1));
    counts_.resize(static_cast<size_t>(segments.num_segments));
    weights_.resize(static_cast<size_t>(weights.num_elements()));
    path.await();  // see download
    copy_out(starts_, segments.starts, stream);
    copy_out(counts_, segments.counts, stream);
    copy_out(weights_, weights.data, stream);
    path.await();
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

// Passes another dispatcher's plan on unchanged: the path refuses it.
const Plan& plan_on_device(const Plan& plan) {
  const auto* copied = dynamic_cast<const CopiedPlan*>(plan.device_data().get());
  return copied != nullptr ? copied->device_plan() : plan;
}

Shape with_rows(const Shape& shape, int64_t num_rows) {
  return shape.rank() > 1 ? Shape{num_rows, shape[1]} : Shape{num_rows};
}

}  // namespace

HostTensors::HostTensors(std::unique_ptr<Path> path, Group& group, int device)
    : group_(group),
      stream_(lease_stream(device)),
      pool_(DeviceArena::make(device, MemorySharing::kNone)),
      path_(std::move(path)) {
  set_options({});
}

void HostTensors::set_options(const DeviceOptions& options) {
  DeviceOptions own = options;
  own.stream = stream_->view();
  path_->set_options(own);
}

// Passes invalid tensors on unchanged: the path reports what is wrong.
OwnedTensor HostTensors::upload(const ConstTensorView& tensor) {
  return tensor.given() ? upload_as(tensor.shape, tensor) : OwnedTensor{};
}

// Row tensors on the device have capacity_rows rows.
OwnedTensor HostTensors::upload_rows(const Plan& plan, const ConstTensorView& rows) {
  if (!rows.given() || rows.num_rows() != plan.num_rows()) return upload(rows);
  return upload_as(with_rows(rows.shape, plan_on_device(plan).capacity_rows()), rows);
}

// REQUIRES: the tensor fits in `shape`.
OwnedTensor HostTensors::upload_as(const Shape& shape, const ConstTensorView& tensor) {
  const RelaxedCapture relaxed;
  const Buffer buffer = pool_.take(shape.num_elements() * size_of(tensor.dtype), stream_->get());
  OwnedTensor copy = owned_tensor(buffer, tensor.dtype, shape);
  if (tensor.data == nullptr) {
    copy.view.data = nullptr;
  } else if (tensor.num_bytes() > 0) {
    CROSSDOCK_CUDA(cudaMemcpyAsync(buffer.data(), tensor.data,
                                   static_cast<size_t>(tensor.num_bytes()), cudaMemcpyHostToDevice,
                                   stream_->get()));
  }
  return copy;
}

OwnedTensor HostTensors::download(const ConstTensorView& tensor, int64_t num_rows,
                                  const TensorView& given) {
  const RelaxedCapture relaxed;
  OwnedTensor copy{.view = given, .owner = nullptr};
  const Shape shape = with_rows(tensor.shape, num_rows);
  if (!given.given()) copy = group_.pool().take(tensor.dtype, shape);
  // A copy queued behind kernels that wait for other ranks could keep those ranks from launching.
  path_->await();
  if (copy.view.num_bytes() > 0) {
    CROSSDOCK_CUDA(cudaMemcpyAsync(copy.view.data, tensor.data,
                                   static_cast<size_t>(copy.view.num_bytes()),
                                   cudaMemcpyDeviceToHost, stream_->get()));
  }
  path_->await();
  return copy;
}

void HostTensors::copy_in(const char* operation, const Plan* plan,
                          const std::function<void()>& uploads) {
  const std::optional<Error> refusal = refusal_of([&] {
    group_.check();  // after a failed call a copy could wait forever
    uploads();
  });
  if (!refusal) return;
  group_.agree(
      {.operation = operation, .subject = plan != nullptr ? plan->id() : 0, .refusal = &*refusal});
}

Plan HostTensors::copy_out(const Plan& device_plan) {
  std::shared_ptr<const CopiedPlan> copied;
  run_agreed(group_,
             [&] { copied = std::make_shared<const CopiedPlan>(device_plan, stream_, *path_); });
  path_->check();  // the device is done: a refused routing is known on all ranks
  return device_plan.with_device_data(std::move(copied));
}

template <typename AnyRouting>
Plan HostTensors::plan_copy(const ConstTensorView& routes, const AnyRouting& routing) {
  OwnedTensor routes_there;
  OwnedTensor weights;
  OwnedTensor mask;
  copy_in("plan", nullptr, [&] {
    routes_there = upload(routes);
    weights = upload(routing.weights);
    mask = upload(routing.mask);
  });
  return copy_out(path_->plan(AnyRouting{routes_there.view, weights.view, mask.view}));
}

Plan HostTensors::plan(const Routing& routing) {
  return plan_copy(routing.expert_ids, routing);
}

Plan HostTensors::plan(const DenseRouting& routing) {
  return plan_copy(routing.map, routing);
}

DispatchResult HostTensors::dispatch(const Plan& plan, const DispatchArgs& args, Begun* /*begun*/) {
  OwnedTensor x;
  OwnedTensor scales;
  OwnedTensor rows;
  OwnedTensor row_scales;
  OwnedTensor row_weights;
  copy_in("dispatch", &plan, [&] {
    check_outputs(args);  // here: the copies on the device never overlap
    x = upload(args.x);
    scales = upload(args.scales);
    rows = upload_rows(plan, args.rows);
    row_scales = upload_rows(plan, args.row_scales);
    row_weights = upload_rows(plan, args.row_weights);
  });
  const DispatchResult moved = path_->dispatch(plan_on_device(plan),
                                               {.x = x.view,
                                                .scales = scales.view,
                                                .rows = rows.view,
                                                .row_scales = row_scales.view,
                                                .row_weights = row_weights.view,
                                                .with_row_weights = args.with_row_weights,
                                                .num_chunks = args.num_chunks,
                                                .on_chunk = args.on_chunk},
                                               nullptr);
  DispatchResult result;
  run_agreed(group_, [&] {
    const int64_t R = plan.num_rows();
    result.rows = download(moved.rows.view, R, args.rows);
    if (args.scales.given()) {
      result.row_scales = download(moved.row_scales.view, R, args.row_scales);
    }
    if (args.with_row_weights) {
      result.row_weights = download(moved.row_weights.view, R, args.row_weights);
    }
  });
  return result;
}

OwnedTensor HostTensors::gather_sum(const char* operation, const Plan& plan,
                                    const GatherSumArgs& args, Begun* /*begun*/) {
  OwnedTensor rows;
  OwnedTensor out;
  copy_in(operation, &plan, [&] {
    check_outputs(args);
    rows = upload_rows(plan, args.rows);
    out = upload(args.out);
  });
  const ConstTensorView weights =
      args.weights.given() ? plan_on_device(plan).weights() : ConstTensorView{};
  const OwnedTensor sum =
      path_->gather_sum(operation, plan_on_device(plan),
                        {.rows = rows.view, .weights = weights, .out = out.view}, nullptr);
  OwnedTensor result;
  run_agreed(group_, [&] { result = download(sum.view, plan.num_tokens(), args.out); });
  return result;
}

CombineBackwardResult HostTensors::combine_backward(const Plan& plan,
                                                    const CombineBackwardArgs& args) {
  OwnedTensor grad_out;
  OwnedTensor y;
  OwnedTensor grad_rows;
  OwnedTensor grad_weights;
  copy_in("combine_backward", &plan, [&] {
    check_outputs(args);
    grad_out = upload(args.grad_out);
    y = upload_rows(plan, args.y);
    grad_rows = upload_rows(plan, args.grad_rows);
    grad_weights = upload(args.grad_weights);
  });
  const CombineBackwardResult moved =
      path_->combine_backward(plan_on_device(plan), {.grad_out = grad_out.view,
                                                     .y = y.view,
                                                     .grad_rows = grad_rows.view,
                                                     .grad_weights = grad_weights.view});
  CombineBackwardResult result;
  run_agreed(group_, [&] {
    result.grad_rows = download(moved.grad_rows.view, plan.num_rows(), args.grad_rows);
    result.grad_weights = download(moved.grad_weights.view, plan.num_tokens(), args.grad_weights);
  });
  return result;
}

OwnedTensor HostTensors::collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) {
  OwnedTensor values;
  OwnedTensor collected;
  copy_in("collect_routes", &plan, [&] {
    check_outputs(rows, routes);
    values = upload_rows(plan, rows);
    collected = upload(routes);
  });
  const OwnedTensor moved =
      path_->collect_routes(plan_on_device(plan), values.view, collected.view);
  OwnedTensor result;
  run_agreed(group_, [&] { result = download(moved.view, plan.num_tokens(), routes); });
  return result;
}

OwnedTensor HostTensors::allocate_rows(const Plan& plan, DType dtype) {
  return group_.pool().take(dtype, {plan.num_rows(), plan.data().config->width});
}

}  // namespace crossdock::cuda

namespace crossdock {

std::unique_ptr<Path> make_host_tensors_path(std::unique_ptr<Path> path, Group& group,
                                             Device device) {
  return std::make_unique<cuda::HostTensors>(std::move(path), group, device.index);
}

}  // namespace crossdock
