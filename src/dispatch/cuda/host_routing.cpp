#include "dispatch/cuda/host_routing.hpp"

#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

void check_not_captured(cudaStream_t stream) {
  CROSSDOCK_CHECK(!is_capturing(stream),
                  "this plan is made on the host, which cannot be captured in a graph; use direct, "
                  "routes by slot, drops by position and a configured max_rows");
}

template <typename AnyRouting, typename PlanRouting>
Plan plan_copied(CudaRank& rank, const AnyRouting& routing, const PlanRouting& plan) {
  HostRouting host;
  const std::optional<Error> refusal = refusal_of([&] {
    rank.raise_faults();
    check_not_captured(rank.stream());
    CROSSDOCK_CHECK(routing.weights.dtype == DType::kF32, "weights on a GPU must be fp32, got ",
                    name_of(routing.weights.dtype));
    host = HostRouting(routing, rank.stream());
  });
  if (refusal) {
    rank.group().agree({.operation = "plan", .rejection = &*refusal});  // throws on all ranks
  }
  return with_device_arrays(rank, plan(host));
}

}  // namespace

ConstTensorView HostRouting::copy(const ConstTensorView& tensor, Buffer& buffer,
                                  cudaStream_t stream) {
  if (!tensor.given() || tensor.device.is_cpu()) return tensor;
  buffer = Buffer(tensor.num_bytes());
  if (tensor.num_bytes() > 0) {
    CROSSDOCK_CUDA(cudaMemcpyAsync(buffer.data(), tensor.data,
                                   static_cast<size_t>(tensor.num_bytes()), cudaMemcpyDeviceToHost,
                                   stream));
  }
  return {buffer.data(), tensor.dtype, tensor.shape};
}

HostRouting::HostRouting(const Routing& routing, cudaStream_t stream) {
  routes_ = copy(routing.expert_ids, route_bytes_, stream);
  weights_ = copy(routing.weights, weight_bytes_, stream);
  mask_ = copy(routing.mask, mask_bytes_, stream);
  CROSSDOCK_CUDA(cudaStreamSynchronize(stream));
}

HostRouting::HostRouting(const DenseRouting& routing, cudaStream_t stream) {
  routes_ = copy(routing.map, route_bytes_, stream);
  weights_ = copy(routing.weights, weight_bytes_, stream);
  mask_ = copy(routing.mask, mask_bytes_, stream);
  CROSSDOCK_CUDA(cudaStreamSynchronize(stream));
}

Routing HostRouting::routing() const {
  return {.expert_ids = routes_, .weights = weights_, .mask = mask_};
}

DenseRouting HostRouting::dense_routing() const {
  return {.map = routes_, .weights = weights_, .mask = mask_};
}

Plan with_device_arrays(CudaRank& rank, const Plan& host_plan) {
  std::shared_ptr<CudaPlan> arrays;
  run_agreed(rank.group(), [&] {
    const PlanData& data = host_plan.data();
    arrays = std::make_shared<CudaPlan>(rank.pool(), rank.plan_inputs(data.T));
    arrays->upload(data);
  });
  return host_plan.with_device_data(std::move(arrays));
}

Plan plan_on_host(CudaRank& rank, const Routing& routing, const DevicePath::PlanOnHost& plan) {
  return plan_copied(rank, routing, [&](const HostRouting& host) { return plan(host.routing()); });
}

Plan plan_on_host(CudaRank& rank, const DenseRouting& routing,
                  const DevicePath::PlanDenseOnHost& plan) {
  return plan_copied(rank, routing,
                     [&](const HostRouting& host) { return plan(host.dense_routing()); });
}

}  // namespace crossdock::cuda
