#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "crossdock/router.hpp"

namespace crossdock::router {

/// Executes the calls of a Router on tensors of one device. Thread-safe. REQUIRES: arguments that
/// have been checked and are all on that device.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual RouterOutput route(const RouteArgs& args) = 0;
  virtual RouterLosses losses(const RouterOutput& output, const LossCounts& counts,
                              Stream stream) = 0;
  virtual void backward(const RouterBackwardArgs& args) = 0;
  virtual RouterStatistics sum(const RouterStatistics& a, const RouterStatistics& b,
                               Stream stream) = 0;
};

std::unique_ptr<Backend> make_host_backend(const RouterConfig& config,
                                           std::shared_ptr<ThreadPool> pool);

// In builds without CUDA, all of these throw Error(kUnsupported).

/// Throws Error(kUnsupported) if GPUs do not support the configuration. `shared_memory`, in bytes
/// per block: only tests set it, to less than the GPU has.
std::unique_ptr<Backend> make_device_backend(const RouterConfig& config, Device device,
                                             std::optional<int64_t> shared_memory = {});

/// Copies a GPU tensor to `to` and waits for the stream. Throws Error(kInvalidArgument) if the
/// stream is being captured.
void read_device(const ConstTensorView& tensor, std::span<std::byte> to, Stream stream);

/// Sums the counts of several ranks or sequences on a GPU.
struct SumBatchesArgs {
  ConstTensorView counts;     // [n, B * E + B] int64, laid out as RouterStatistics::device_counts
  int64_t num_sequences = 1;  // B
  TensorView sum;             // out [E + 1] int64, the counts of one batch
};
void sum_batches_on_device(const SumBatchesArgs& args, Stream stream);

/// update_expert_bias for a checked fp32 bias and statistics on one GPU.
void update_bias_on_device(const TensorView& bias, const RouterStatistics& statistics,
                           const BiasUpdate& update, Stream stream);

// Check a router's configuration and arguments, identically for every device. All throw
// Error(kInvalidArgument).

/// The settings as "key=value;key=value". Routers with equal texts compute the same.
std::string config_text(const RouterConfig& config);

void check_config(const RouterConfig& config);
void check_route_args(const RouterConfig& config, const RouteArgs& args);
/// Refuses the output of a router with a different configuration. `name` is for the message.
void check_origin(const char* name, const RouterConfig& config, const RouterOutput& output);
void check_backward_args(const RouterConfig& config, const RouterBackwardArgs& args);

}  // namespace crossdock::router
