#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "crossdock/dispatcher.hpp"

namespace crossdock {

/// What a dispatcher and its device path share.
struct DevicePathContext {
  Group& group;
  std::shared_ptr<const DispatchConfig> config;
  std::string config_text;  // what all ranks must have alike
  std::string strategy_name;
  DeviceOptions options;
};

/// A dispatcher's calls for tensors that are not in host memory; the members mean what those of
/// Dispatcher mean, and are collective like them. Made at the first plan for such tensors.
class DevicePath {
 public:
  virtual ~DevicePath() = default;

  /// Stream and limits of later calls.
  virtual void set_options(const DeviceOptions& options) = 0;

  /// A routing of the device. `plan_on_host` makes a plan of host tensors by the dispatcher's own
  /// means; it is used where a plan cannot be made on the device.
  using PlanOnHost = std::function<Plan(const Routing&)>;
  virtual Plan plan(const Routing& routing, const PlanOnHost& plan_on_host) = 0;
  using PlanDenseOnHost = std::function<Plan(const DenseRouting&)>;
  virtual Plan plan(const DenseRouting& routing, const PlanDenseOnHost& plan_on_host) = 0;

  virtual DispatchResult dispatch(const Plan& plan, const DispatchArgs& args) = 0;
  virtual OwnedTensor sum_rows(const char* operation, const Plan& plan,
                               const GatherSumArgs& args) = 0;
  virtual CombineBackwardResult combine_backward(const Plan& plan, ConstTensorView grad_out,
                                                 ConstTensorView y) = 0;
  virtual OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows) = 0;
  virtual OwnedTensor allocate_rows(const Plan& plan, DType dtype) = 0;

  /// Calls from here to end_aside are queued in a stream of their own, which waits for what the
  /// caller's stream holds now and runs beside what is queued there afterwards. end_aside returns
  /// what finish makes the caller's stream wait for; null where calls are done when they return.
  virtual void begin_aside() = 0;
  virtual std::shared_ptr<const void> end_aside() = 0;
  virtual void finish(const std::shared_ptr<const void>& done) = 0;

  /// Throws what the device has reported, if anything; does not wait for it.
  virtual void check() = 0;
};

/// Throws Error(kUnsupported) where this build has no CUDA or this machine no such device.
std::unique_ptr<DevicePath> make_device_path(DevicePathContext context, Device device);

/// The same for host tensors, which are copied to the device and back.
std::unique_ptr<DevicePath> make_staged_path(DevicePathContext context, Device device);

}  // namespace crossdock
