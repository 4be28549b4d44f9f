// Results of a router; copying them from a GPU to the host.
#include "crossdock/router.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
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

namespace {

void check_update(const BiasUpdate& update) {
  CROSSDOCK_CHECK(std::isfinite(update.rate), "the rate of an update of the expert bias must be ",
                  "finite, got ", update.rate);
}

int64_t total_of(std::span<const int64_t> load) {
  int64_t total = 0;
  for (size_t e = 0; e < load.size(); ++e) {
    CROSSDOCK_CHECK(load[e] >= 0 && load[e] <= std::numeric_limits<int64_t>::max() - total,
                    "the loads are numbers of routes: they must not be negative and must sum to at "
                    "most 2^63 - 1, got ",
                    load[e], " for expert ", e);
    total += load[e];
  }
  return total;
}

template <typename T>
void add_steps(TensorView bias, const std::vector<double>& steps) {
  const std::span<T> values = bias.as<T>();
  for (size_t e = 0; e < steps.size(); ++e) {
    values[e] = static_cast<T>(static_cast<double>(values[e]) + steps[e]);
  }
}

}  // namespace

void update_expert_bias(TensorView bias, const RouterStatistics& statistics,
                        const BiasUpdate& update, Stream stream) {
  if (!statistics.is_on_device()) return update_expert_bias(bias, statistics.load(), update);
  check_update(update);
  const ConstTensorView counts = statistics.device_counts.view;
  const int64_t E = counts.num_elements() / std::max<int64_t>(statistics.num_sequences, 1) - 1;
  check_tensor("bias", bias, counts.device, DType::kF32, Shape{E});
  router::update_bias_on_device(bias, statistics, update, stream);
}

void update_expert_bias(TensorView bias, std::span<const int64_t> load, const BiasUpdate& update) {
  check_update(update);
  const auto E = static_cast<int64_t>(load.size());
  const bool is_f64 = bias.dtype == DType::kF64;
  check_tensor("bias", bias, is_f64 ? DType::kF64 : DType::kF32, Shape{E});
  const int64_t total = total_of(load);
  std::vector<double> steps(load.size());
  for (size_t e = 0; e < load.size(); ++e) {
    // Compares the load with total / E, without rounding.
    const bool is_below = load[e] < total / E || (load[e] == total / E && total % E > 0);
    steps[e] = is_below ? update.rate : load[e] > total / E ? -update.rate : 0.0;
  }
  if (update.centred && E > 0) {
    const double mean = std::accumulate(steps.begin(), steps.end(), 0.0) / static_cast<double>(E);
    for (double& step : steps) step -= mean;
  }
  if (is_f64) {
    add_steps<double>(bias, steps);
  } else {
    add_steps<float>(bias, steps);
  }
}

namespace {

void require_host_counts(const RouterStatistics& statistics, const char* instead) {
  CROSSDOCK_CHECK(!statistics.is_on_device(), "the statistics are on a GPU; use ", instead);
}

}  // namespace

RouterStatistics RouterStatistics::on_host(Stream stream) const {
  if (!is_on_device()) return *this;
  std::vector<int64_t> counts(static_cast<size_t>(device_counts.view.num_elements()));
  router::read_device(device_counts.view, std::as_writable_bytes(std::span(counts)), stream);
  const auto tokens = counts.end() - num_sequences;
  return {.num_sequences = num_sequences,
          .routes_per_expert = {counts.begin(), tokens},
          .num_tokens = {tokens, counts.end()}};
}

std::vector<int64_t> RouterStatistics::load() const {
  require_host_counts(*this, "on_host().load()");
  const auto num_counts = std::ssize(routes_per_expert);
  CROSSDOCK_CHECK(num_counts == 0 || (num_sequences >= 1 && num_counts % num_sequences == 0),
                  "routes_per_expert must be [num_sequences (", num_sequences, "), E], got ",
                  num_counts, " values");
  const size_t E =
      routes_per_expert.size() / static_cast<size_t>(std::max<int64_t>(num_sequences, 1));
  std::vector<int64_t> sums(E, 0);
  for (size_t begin = 0; begin < routes_per_expert.size(); begin += E) {
    for (size_t e = 0; e < E; ++e) sums[e] += routes_per_expert[begin + e];
  }
  return sums;
}

void RouterStatistics::add(const RouterStatistics& other) {
  require_host_counts(*this, "Router::sum");
  require_host_counts(other, "Router::sum");
  CROSSDOCK_CHECK(num_sequences == other.num_sequences &&
                      routes_per_expert.size() == other.routes_per_expert.size() &&
                      num_tokens.size() == other.num_tokens.size(),
                  "statistics to be added must have the same sequences and experts; got ",
                  num_sequences, " and ", other.num_sequences, " sequences");
  for (size_t i = 0; i < routes_per_expert.size(); ++i) {
    routes_per_expert[i] += other.routes_per_expert[i];
  }
  for (size_t i = 0; i < num_tokens.size(); ++i) num_tokens[i] += other.num_tokens[i];
}

Routing RouterOutput::routing() const& {
  return {.expert_ids = expert_ids.view(DType::kI32, {T, K}),
          .weights = weights.view(weight_dtype, {T, K}),
          .mask = {}};
}

RouterLosses RouterLosses::on_host(Stream stream) const {
  if (!is_on_device()) return *this;
  std::array<double, 5> values{};
  router::read_device(device_values.view, std::as_writable_bytes(std::span(values)), stream);
  const auto [aux_sum, z_loss, batch, sequence, global_batch] = values;
  return {.aux = aux_sum,
          .z = z_loss,
          .aux_terms = {.batch = batch, .sequence = sequence, .global_batch = global_batch}};
}

}  // namespace crossdock
