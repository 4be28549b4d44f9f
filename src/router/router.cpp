// Results of a router; copying them from a GPU to the host.
#include "crossdock/router.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "router/backend.hpp"
#include "router/balance_losses.hpp"

namespace crossdock::router {
namespace {

DType sum_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

void check_if_given(const char* name, const ConstTensorView& tensor, Device device, DType dtype,
                    const Shape& shape) {
  if (tensor.given()) check_tensor(name, tensor, device, dtype, shape);
}

constexpr int64_t kMaxSequences = std::numeric_limits<int32_t>::max();  // ids are int32
constexpr int64_t kMaxCounters = int64_t{1} << 28;                      // 2 GiB

void check_finite(const char* name, double value) {
  CROSSDOCK_CHECK(std::isfinite(value), name, " must be finite, got ", value);
}

void check_gate(const RouterConfig& config, const GateWeights& gate, Device device) {
  const bool is_f64 = config.dtype == DType::kF64;
  CROSSDOCK_CHECK(is_summable(gate.weight.dtype) && (gate.weight.dtype == DType::kF64) == is_f64,
                  "the gate must be fp64 for fp64 tokens, else fp32, bf16 or fp16, got ",
                  name_of(gate.weight.dtype));
  check_tensor("the gate", gate.weight, device, gate.weight.dtype,
               Shape{config.num_experts, config.width});
  check_if_given("the gate's bias", gate.bias, device, gate.weight.dtype,
                 Shape{config.num_experts});
}

void check_forced_ids(const ConstTensorView& ids, Device device, const Shape& shape) {
  if (!ids.given()) return;
  const bool are_ids = ids.dtype == DType::kI32 || ids.dtype == DType::kI64;
  CROSSDOCK_CHECK(are_ids && ids.shape == shape, "forced_ids must be ", shape.to_string(),
                  " int32 or int64, got ", describe(ids));
  check_memory("forced_ids", ids, device);
}

void check_sequences(const RouterConfig& config, const RouteArgs& args, int64_t T) {
  CROSSDOCK_CHECK(args.num_sequences >= 1 && args.num_sequences <= kMaxSequences,
                  "num_sequences must be in [1, ", kMaxSequences, "], got ", args.num_sequences);
  CROSSDOCK_CHECK(!config.counts(BalanceScope::kSequence) ||
                      args.num_sequences <= kMaxCounters / (config.num_experts + 1),
                  "num_sequences (", args.num_sequences, ") times num_experts + 1 (",
                  config.num_experts + 1, ") must be at most ", kMaxCounters,
                  ", the number of counters of a call; route fewer sequences at a time");
  CROSSDOCK_CHECK(args.sequence_ids.given() || !config.counts(BalanceScope::kSequence) ||
                      args.num_sequences == 1 || T == 0,
                  "sequence_ids must be given for the loss of ", args.num_sequences, " sequences");
  check_if_given("sequence_ids", args.sequence_ids, args.x.device, DType::kI32, Shape{T});
}

void check_sequence_values(const RouteArgs& args) {
  const auto ids = args.sequence_ids.as<int32_t>();
  for (int64_t t = 0; t < std::ssize(ids); ++t) {
    const int32_t id = ids[static_cast<size_t>(t)];
    CROSSDOCK_CHECK(id >= 0 && id < args.num_sequences, "sequence_ids[", t, "] must be in [0, ",
                    args.num_sequences, "), got ", id);
  }
}

template <typename Id>
void check_forced_values(const RouterConfig& config, std::span<const Id> ids, const bool* mask) {
  const int64_t K = config.top_k;
  const int64_t E = config.num_experts;
  // [E] last token that named the expert; -1: none
  std::vector<int64_t> last_token(static_cast<size_t>(E), -1);
  for (int64_t i = 0; i < std::ssize(ids); ++i) {
    const int64_t token = i / K;
    if (mask != nullptr && mask[token]) continue;
    const Id id = ids[static_cast<size_t>(i)];
    CROSSDOCK_CHECK(id >= -1 && id < E, "forced expert of token ", token, " slot ", i % K,
                    " must be in [0, ", E, ") or -1, got ", id);
    if (id == -1) continue;
    int64_t& last = last_token[static_cast<size_t>(id)];
    CROSSDOCK_CHECK(last != token, "forced expert of token ", token, " slot ", i % K,
                    " must differ from those of earlier slots, got ", id, " again");
    last = token;
  }
}

// Only values in host memory are checked: checking them on a GPU would require a wait.
void check_host_values(const RouterConfig& config, const RouteArgs& args) {
  if (args.sequence_ids.given()) check_sequence_values(args);
  if (!args.forced_ids.given()) return;
  const bool* mask = pointer<bool>(args.mask);
  if (args.forced_ids.dtype == DType::kI64) {
    check_forced_values(config, args.forced_ids.as<int64_t>(), mask);
  } else {
    check_forced_values(config, args.forced_ids.as<int32_t>(), mask);
  }
}

}  // namespace

std::string config_text(const RouterConfig& config) {
  return concat(std::setprecision(17), "num_experts=", config.num_experts, ";top_k=", config.top_k,
                ";width=", config.width, ";dtype=", name_of(config.dtype),
                ";score=", name_of(config.score), ";groups=", config.num_groups, "/",
                config.group_top_k, "/", static_cast<int>(config.group_score),
                ";normalise=", config.normalises(), ";scaling=", config.scaling,
                ";aux_loss=", config.aux_loss_coeff, "/", static_cast<int>(config.aux_loss_scope),
                ";aux_loss_coeffs=", config.aux_loss_coeffs.batch, "/",
                config.aux_loss_coeffs.sequence, "/", config.aux_loss_coeffs.global_batch,
                ";z_loss=", config.z_loss_coeff, ";jitter=", config.jitter,
                ";force_balance=", config.force_balance);
}

void check_config(const RouterConfig& config) {
  const int64_t E = config.num_experts;
  const int64_t K = config.top_k;
  CROSSDOCK_CHECK(config.width >= 1 && K >= 1, "width and top_k must be at least 1, got ",
                  config.width, " and ", K);
  CROSSDOCK_CHECK(E >= K, "num_experts (", E, ") must be at least top_k (", K, ")");
  CROSSDOCK_CHECK(is_summable(config.dtype),
                  "tokens of a router must be fp64, fp32, bf16 or fp16, got ",
                  name_of(config.dtype));
  const int64_t num_groups = config.num_groups;
  CROSSDOCK_CHECK(num_groups >= 1 && E % num_groups == 0, "num_experts (", E,
                  ") must be a multiple of num_groups (", num_groups, ")");
  CROSSDOCK_CHECK(config.group_top_k >= 1 && config.group_top_k <= num_groups, "group_top_k (",
                  config.group_top_k, ") must be from 1 to num_groups (", num_groups, ")");
  if (config.group_top_k < num_groups) {
    CROSSDOCK_CHECK(config.group_score != GroupScore::kTopShare || K % config.group_top_k == 0,
                    "top_k (", K, ") must be a multiple of group_top_k (", config.group_top_k,
                    ") where group_score is kTopShare");
    CROSSDOCK_CHECK(config.group_top_k * (E / num_groups) >= K, "group_top_k (", config.group_top_k,
                    ") groups of ", E / num_groups, " experts must have at least top_k (", K,
                    ") experts");
  }
  check_finite("scaling", config.scaling);
  check_finite("aux_loss_coeff", config.aux_loss_coeff);
  check_finite("aux_loss_coeffs.batch", config.aux_loss_coeffs.batch);
  check_finite("aux_loss_coeffs.sequence", config.aux_loss_coeffs.sequence);
  check_finite("aux_loss_coeffs.global_batch", config.aux_loss_coeffs.global_batch);
  check_finite("z_loss_coeff", config.z_loss_coeff);
  CROSSDOCK_CHECK(config.jitter >= 0.0 && config.jitter < 1.0, "jitter must be in [0, 1), got ",
                  config.jitter);
}

void check_route_args(const RouterConfig& config, const RouteArgs& args) {
  const int64_t T = args.x.num_rows();
  const Device device = args.x.device;
  check_tensor("x", args.x, device, config.dtype, Shape{T, config.width});
  check_gate(config, args.gate, device);
  check_if_given("expert_bias", args.expert_bias, device, sum_dtype(config.dtype),
                 Shape{config.num_experts});
  check_if_given("mask", args.mask, device, DType::kBool, Shape{T});
  check_if_given("token_ids", args.token_ids, device, DType::kI64, Shape{T});
  check_sequences(config, args, T);
  check_forced_ids(args.forced_ids, device, Shape{T, config.top_k});
  if (device.is_cpu()) check_host_values(config, args);
}

void check_origin(const char* name, const RouterConfig& config, const RouterOutput& output) {
  RouterConfig other = output.config;
  if (other.normalises() == config.normalises()) other.normalise = config.normalise;
  CROSSDOCK_CHECK(other == config, name, " must come from a router with ", config_text(config),
                  ", got it from a router with ", config_text(other));
}

void check_backward_args(const RouterConfig& config, const RouterBackwardArgs& args) {
  CROSSDOCK_CHECK(args.output != nullptr, "output must be the result of route, got none");
  check_origin("output", config, *args.output);
  const int64_t T = args.output->T;
  const int64_t E = config.num_experts;
  const DType sums = sum_dtype(config.dtype);
  const Device device = args.output->device();
  check_tensor("x", args.x, device, config.dtype, Shape{T, config.width});
  check_gate(config, args.gate, device);
  check_if_given("grad_weights", args.grad_weights, device, sums, Shape{T, config.top_k});
  check_if_given("grad_x", args.grad_x, device, config.dtype, Shape{T, config.width});
  check_if_given("grad_gate", args.grad_gate, device, sums, Shape{E, config.width});
  check_if_given("grad_bias", args.grad_bias, device, sums, Shape{E});
  check_if_given("grad_logits", args.grad_logits, device, sums, Shape{T, E});
  check_counts(config, *args.output, args.counts);
  const Routing routes = args.output->routing();
  const ConstTensorView logits = args.output->logits.view(args.output->weight_dtype, {T, E});
  check_no_overlap({{"grad_x", args.grad_x},
                    {"grad_gate", args.grad_gate},
                    {"grad_bias", args.grad_bias},
                    {"grad_logits", args.grad_logits}},
                   {{"x", args.x},
                    {"the gate", args.gate.weight},
                    {"the gate's bias", args.gate.bias},
                    {"grad_weights", args.grad_weights},
                    {"logits", logits},
                    {"expert_ids", routes.expert_ids},
                    {"weights", routes.weights}});
}

}  // namespace crossdock::router

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
    for (size_t e = 0; e < E; ++e) {
      sums[e] = router::add_counts(sums[e], routes_per_expert[begin + e]);
    }
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
    routes_per_expert[i] = router::add_counts(routes_per_expert[i], other.routes_per_expert[i]);
  }
  for (size_t i = 0; i < num_tokens.size(); ++i) {
    num_tokens[i] = router::add_counts(num_tokens[i], other.num_tokens[i]);
  }
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
