#include "dispatch/cuda/host_routing.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/call.hpp"
#include "dispatch/cuda/gpu_call.hpp"
#include "dispatch/host/host_path.hpp"

namespace crossdock::cuda {
namespace {

/// Host copy of a routing on the device. Waits for the device, so it cannot be made in a capture.
class HostRouting {
 public:
  /// routes: expert_ids or map, as named.
  HostRouting(const CudaRank& rank, const char* routes_name, const ConstTensorView& routes,
              const ConstTensorView& weights, const ConstTensorView& mask);

  /// Routing or DenseRouting.
  template <typename AnyRouting>
  AnyRouting view() const {
    return {routes_, weights_, mask_};
  }

 private:
  static ConstTensorView copy(const char* name, const ConstTensorView& tensor, Buffer& buffer,
                              const CudaRank& rank);
  void round_weights();

  Buffer route_bytes_;
  Buffer weight_bytes_;
  Buffer mask_bytes_;
  ConstTensorView routes_;
  ConstTensorView weights_;
  ConstTensorView mask_;
};

HostRouting::HostRouting(const CudaRank& rank, const char* routes_name,
                         const ConstTensorView& routes, const ConstTensorView& weights,
                         const ConstTensorView& mask) {
  routes_ = copy(routes_name, routes, route_bytes_, rank);
  weights_ = copy("weights", weights, weight_bytes_, rank);
  mask_ = copy("mask", mask, mask_bytes_, rank);
  rank.await_stream();
  const bool is_readable = weights_.data != nullptr || weights_.num_elements() == 0;
  if (weights_.dtype == DType::kF64 && is_readable) round_weights();
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

// routes: expert_ids or map of the routing, as named.
template <typename AnyRouting>
Plan plan_copied(CudaRank& rank, const AnyRouting& routing, const char* routes_name,
                 const ConstTensorView& routes, const MakeDeviceData& make_device_data) {
  std::optional<HostRouting> host;
  GpuCall call(rank, {.operation = "plan"});
  call.prepare([&] {
    check_not_captured(rank);
    rank.await_stream();  // copies must not wait for kernels
    host.emplace(rank, routes_name, routes, routing.weights, routing.mask);
  });
  if (call.is_refused()) call.agree({.must_meet = true});  // throws on all ranks
  const Plan host_plan = make_host_plan(rank.context(), host->view<AnyRouting>());
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

Plan plan_on_host(CudaRank& rank, const Routing& routing, const MakeDeviceData& make_device_data) {
  return plan_copied(rank, routing, "expert_ids", routing.expert_ids, make_device_data);
}

Plan plan_on_host(CudaRank& rank, const DenseRouting& routing,
                  const MakeDeviceData& make_device_data) {
  return plan_copied(rank, routing, "map", routing.map, make_device_data);
}

}  // namespace crossdock::cuda
