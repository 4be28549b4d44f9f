#include "dispatch/cuda/host_routing.hpp"

#include <algorithm>
#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/gpu_call.hpp"
#include "dispatch/dispatch_args.hpp"
#include "dispatch/host/host_path.hpp"

namespace crossdock::cuda {
namespace {

template <typename AnyRouting, typename PlanRouting>
Plan plan_copied(CudaRank& rank, const AnyRouting& routing, const PlanRouting& plan,
                 const MakeDeviceData& make_device_data) {
  HostRouting host;
  GpuCall call(rank, {.operation = "plan"});
  call.prepare([&] {
    check_not_captured(rank);
    rank.await_stream();  // copies must not wait for kernels
    host = HostRouting(routing, rank);
  });
  if (call.is_refused()) call.agree({.must_meet = true});  // throws on all ranks
  const Plan host_plan = plan(host);
  std::shared_ptr<const DevicePlanData> device_data;
  run_agreed(rank.group(), [&] { device_data = make_device_data(host_plan); });
  return host_plan.with_device_data(std::move(device_data));
}

}  // namespace

void check_not_captured(const CudaRank& rank) {
  CROSSDOCK_CHECK(!is_capturing(rank.stream()),
                  "this plan is made on the host, which cannot be captured in a graph; use direct "
                  "without partial sums, drops by position and a configured max_rows");
}

ConstTensorView HostRouting::copy(const char* name, const ConstTensorView& tensor, Buffer& buffer,
                                  const CudaRank& rank) {
  if (!tensor.given()) return tensor;
  check_device(rank.where(), name, tensor);
  if (tensor.data == nullptr) return {nullptr, tensor.dtype, tensor.shape};  // refused later
  buffer = Buffer(tensor.num_bytes());
  if (tensor.num_bytes() > 0) {
    CROSSDOCK_CUDA(cudaMemcpyAsync(buffer.data(), tensor.data,
                                   static_cast<size_t>(tensor.num_bytes()), cudaMemcpyDeviceToHost,
                                   rank.stream()));
  }
  return {buffer.data(), tensor.dtype, tensor.shape};
}

HostRouting::HostRouting(const Routing& routing, const CudaRank& rank)
    : HostRouting("expert_ids", routing.expert_ids, routing.weights, routing.mask, rank) {}

HostRouting::HostRouting(const DenseRouting& routing, const CudaRank& rank)
    : HostRouting("map", routing.map, routing.weights, routing.mask, rank) {}

HostRouting::HostRouting(const char* routes_name, const ConstTensorView& routes,
                         const ConstTensorView& weights, const ConstTensorView& mask,
                         const CudaRank& rank) {
  routes_ = copy(routes_name, routes, route_bytes_, rank);
  weights_ = copy("weights", weights, weight_bytes_, rank);
  mask_ = copy("mask", mask, mask_bytes_, rank);
  rank.await_stream();
  const bool is_readable = weights_.data != nullptr || weights_.num_elements() == 0;
  if (weights_.dtype == DType::kF64 && is_readable) round_weights();
}

// Plans on a GPU keep all weights in fp32.
void HostRouting::round_weights() {
  const int64_t count = weights_.num_elements();
  Buffer rounded(count * size_of(DType::kF32));
  const auto* from = static_cast<const double*>(weights_.data);
  std::transform(from, from + count, reinterpret_cast<float*>(rounded.data()),
                 [](double weight) { return static_cast<float>(weight); });
  weight_bytes_ = std::move(rounded);
  weights_ = weight_bytes_.view(DType::kF32, weights_.shape);
}

Routing HostRouting::routing() const {
  return {.expert_ids = routes_, .weights = weights_, .mask = mask_};
}

DenseRouting HostRouting::dense_routing() const {
  return {.map = routes_, .weights = weights_, .mask = mask_};
}

Plan plan_on_host(CudaRank& rank, const Routing& routing, const MakeDeviceData& make_device_data) {
  const auto plan_copy = [&](const HostRouting& host) {
    return make_host_plan(rank.context(), host.routing());
  };
  return plan_copied(rank, routing, plan_copy, make_device_data);
}

Plan plan_on_host(CudaRank& rank, const DenseRouting& routing,
                  const MakeDeviceData& make_device_data) {
  const auto plan_copy = [&](const HostRouting& host) {
    return make_host_plan(rank.context(), host.dense_routing());
  };
  return plan_copied(rank, routing, plan_copy, make_device_data);
}

}  // namespace crossdock::cuda
