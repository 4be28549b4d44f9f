#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "crossdock/experts.hpp"

namespace crossdock::experts {

/// Computes for Experts on tensors in one memory: the host's or a GPU's. Thread-safe.
///
/// Arguments have been checked. forward and backward_dx compute all segments of their arguments,
/// which may be a subset of those passed to begin_forward and begin_backward_dx; rows keep their
/// places.
class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  /// Does the one-time work that the first call in a stream would otherwise do.
  virtual void prepare(Stream stream) = 0;
  virtual ExpertsSaved begin_forward(const ExpertsForwardArgs& args) = 0;
  virtual void forward(const ExpertsForwardArgs& args, ExpertsSaved& saved) = 0;
  virtual void begin_backward_dx(const ExpertsBackwardDxArgs& args) = 0;
  virtual void backward_dx(const ExpertsBackwardDxArgs& args) = 0;
  virtual void backward_dw(const ExpertsBackwardDwArgs& args) = 0;
};

std::unique_ptr<Backend> make_host_backend(const ExpertsConfig& config,
                                           std::shared_ptr<ThreadPool> pool);

/// Throws Error(kUnsupported) in builds without CUDA.
std::unique_ptr<Backend> make_device_backend(const ExpertsConfig& config, Device device);

}  // namespace crossdock::experts

namespace crossdock {

/// The backends of one Experts object. GPU backends are created on first use. Thread-safe.
class ExpertsBackends {
 public:
  ExpertsBackends(const ExpertsConfig& config, std::shared_ptr<ThreadPool> pool)
      : config_(config), host_(experts::make_host_backend(config, std::move(pool))) {}

  experts::Backend& on(Device device) {
    if (device.is_cpu()) return *host_;
    const std::lock_guard lock(mutex_);
    std::unique_ptr<experts::Backend>& backend = of_gpus_[device.index];
    if (!backend) backend = experts::make_device_backend(config_, device);
    return *backend;
  }

 private:
  ExpertsConfig config_;
  std::unique_ptr<experts::Backend> host_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<experts::Backend>> of_gpus_;
};

}  // namespace crossdock
