#include "crossdock/router.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "router/backend.hpp"
#include "router/balance_losses.hpp"
#include "router/router_checks.hpp"

namespace crossdock {

/// One backend per device; those of GPUs are created on first use. Thread-safe.
class Router::Backends {
 public:
  Backends(const RouterConfig& config, std::shared_ptr<ThreadPool> pool)
      : config_(config), host_(router::make_host_backend(config, std::move(pool))) {}

  router::Backend& on(Device device) {
    if (device.is_cpu()) return *host_;
    const std::lock_guard lock(mutex_);
    std::unique_ptr<router::Backend>& backend = of_gpu_[device.index];
    if (!backend) backend = router::make_device_backend(config_, device);
    return *backend;
  }

 private:
  RouterConfig config_;
  std::unique_ptr<router::Backend> host_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<router::Backend>> of_gpu_;
};

Router::Router(RouterConfig config, std::shared_ptr<ThreadPool> pool) : config_(config) {
  router::check_config(config_);
  backends_ =
      std::make_shared<Backends>(config_, pool ? std::move(pool) : ThreadPool::process_wide());
}

RouterOutput Router::route(const RouteArgs& args) const {
  router::check_route_args(config_, args);
  RouterOutput output = backends_->on(args.x.device).route(args);
  output.config = config_;
  return output;
}

RouterLosses Router::losses(const RouterOutput& output, const LossCounts& counts,
                            Stream stream) const {
  router::check_origin("output", config_, output);
  router::check_counts(config_, output, counts);
  return backends_->on(output.device()).losses(output, counts, stream);
}

void Router::backward(const RouterBackwardArgs& args) const {
  router::check_backward_args(config_, args);
  backends_->on(args.output->device()).backward(args);
}

RouterStatistics Router::sum(const RouterStatistics& a, const RouterStatistics& b,
                             Stream stream) const {
  router::check_summable(config_, a, b);
  return backends_->on(a.device_counts.view.device).sum(a, b, stream);
}

}  // namespace crossdock
