// Router on a GPU: takes memory and queues kernels.
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "router/backend.hpp"
#include "router/balance_losses.hpp"
#include "router/cuda/hopper/gate_products.hpp"
#include "router/cuda/kernels.hpp"

namespace crossdock::router {
namespace {

void check_device_config(const RouterConfig& config) {
  const auto refuse_unless = [](bool is_supported, const auto&... words) {
    if (!is_supported) throw Error(ErrorCode::kUnsupported, concat(words...));
  };
  refuse_unless(config.dtype != DType::kF64,
                "a router on a GPU takes fp32, bf16 or fp16 tokens, got fp64; route them in host "
                "memory");
  refuse_unless(config.num_experts <= kMaxDeviceExperts, "a router on a GPU has at most ",
                kMaxDeviceExperts, " experts, got ", config.num_experts,
                "; route the tokens in host memory");
  refuse_unless(config.top_k <= kMaxDeviceSlots, "a router on a GPU has a top_k of at most ",
                kMaxDeviceSlots, ", got ", config.top_k, "; route the tokens in host memory");
}

ScoreRules score_rules(const RouterConfig& config) {
  return {.score = config.score,
          .normalises = config.normalises(),
          .scaling = static_cast<float>(config.scaling),
          .E = static_cast<int32_t>(config.num_experts),
          .K = static_cast<int32_t>(config.top_k)};
}

ChoiceRules choice_rules(const RouterConfig& config) {
  const int64_t share =
      config.group_score == GroupScore::kTop2 ? 2 : config.top_k / config.group_top_k;
  return {.num_groups = static_cast<int32_t>(config.num_groups),
          .group_top_k = static_cast<int32_t>(config.group_top_k),
          .group_share = static_cast<int32_t>(share),
          .force_balance = config.force_balance};
}

// Whether the kernels for sm_90a can run on the current device.
bool load_hopper_kernels() {
  return hopper::load_logits() && hopper::load_gradients();
}

void load_router_kernels() {
  load_choose();
  load_counts();
  load_grad_gate();
  load_grad_logits();
  load_grad_x();
  load_logits();
  load_losses();
}

// Gradients of the logits, in the forms that are needed.
struct GradLogits {
  float* values = nullptr;  // [T, E]
  GradParts parts{};
};

bool is_aligned(const ConstTensorView& rows) {
  const auto bits =
      reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.row_bytes());
  return bits % 16 == 0;
}

class DeviceBackend final : public Backend {
 public:
  DeviceBackend(const RouterConfig& config, Device device, std::optional<int64_t> shared_memory)
      : config_(config),
        rules_(score_rules(config)),
        calls_(device.index),
        shared_memory_(shared_memory.value_or(cuda::shared_memory_per_block(device.index))) {
    const cuda::CallGuard guard(device.index);
    load_router_kernels();
    has_hopper_kernels_ = load_hopper_kernels();
  }

  RouterOutput route(const RouteArgs& args) override;
  RouterLosses losses(const RouterOutput& output, const LossCounts& counts, Stream stream) override;
  void backward(const RouterBackwardArgs& args) override;
  RouterStatistics sum(const RouterStatistics& a, const RouterStatistics& b,
                       Stream stream) override;

 private:
  LogitsMeans logits_means() {
    return {.maps = has_hopper_kernels_ ? &tensor_maps_ : nullptr, .shared_memory = shared_memory_};
  }
  OwnedTensor take_counts(int64_t num_sequences, const cuda::DeviceCall& call);
  BatchJitter jitter_of(const RouterOutput& output) const;
  ScopeCounts scope_counts(BalanceScope scope, const RouterOutput& output,
                           const LossCounts& counts) const;
  BalanceArgs balance_args(const RouterOutput& output, const LossCounts& counts) const;
  bool takes_parts(const RouterBackwardArgs& args) const;
  void write_gradients(const RouterBackwardArgs& args, const GradLogits& grads,
                       const cuda::DeviceCall& call);
  void write_grad_bias(const RouterBackwardArgs& args, const float* grad_logits,
                       const cuda::DeviceCall& call);

  RouterConfig config_;
  ScoreRules rules_;
  cuda::DeviceCalls calls_;
  int64_t shared_memory_;  // bytes per block
  bool has_hopper_kernels_ = false;
  ops::hopper::TensorMaps tensor_maps_;
};

OwnedTensor DeviceBackend::take_counts(int64_t num_sequences, const cuda::DeviceCall& call) {
  return call.take(DType::kI64, {num_sequences * (rules_.E + 1)});
}

BatchJitter DeviceBackend::jitter_of(const RouterOutput& output) const {
  return {.size = static_cast<float>(config_.jitter),
          .seed = output.jitter_seed,
          .token_ids = pointer<int64_t>(output.token_ids)};
}

RouterOutput DeviceBackend::route(const RouteArgs& args) {
  const cuda::DeviceCall call(calls_, args.stream);
  const int64_t T = args.x.num_rows();
  const bool by_sequence = config_.counts(BalanceScope::kSequence);
  RouterOutput output;
  output.T = T;
  output.K = rules_.K;
  output.E = rules_.E;
  output.expert_ids = call.take(bytes_of<int32_t>(T * rules_.K));
  output.weights = call.take(bytes_of<float>(T * rules_.K));
  output.logits = call.take(bytes_of<float>(T * rules_.E));
  output.sequences = call.take(bytes_of<int32_t>(T));
  output.jitter_seed = args.jitter_seed;
  output.statistics.num_sequences = by_sequence ? args.num_sequences : 1;
  output.statistics.device_counts = take_counts(output.statistics.num_sequences, call);
  if (config_.jitter != 0.0 && args.token_ids.given() && T > 0) {
    output.token_ids = call.take(args.token_ids.num_bytes());
    CROSSDOCK_CUDA(cudaMemcpyAsync(output.token_ids.data(), args.token_ids.data,
                                   static_cast<size_t>(args.token_ids.num_bytes()),
                                   cudaMemcpyDeviceToDevice, call.handle()));
  }
  auto* const counts = static_cast<unsigned long long*>(output.statistics.device_counts.view.data);
  launch_logits({.x = args.x.data,
                 .x_dtype = args.x.dtype,
                 .gate = args.gate.weight.data,
                 .bias = args.gate.bias.data,
                 .gate_dtype = args.gate.weight.dtype,
                 .jitter = jitter_of(output),
                 .T = T,
                 .E = rules_.E,
                 .D = config_.width,
                 .logits = pointer<float>(output.logits),
                 .counts = counts,
                 .num_counts = output.statistics.device_counts.view.num_elements()},
                logits_means(), call.handle());
  launch_choose({.logits = pointer<float>(output.logits),
                 .expert_bias = pointer<float>(args.expert_bias),
                 .mask = pointer<bool>(args.mask),
                 .sequence_ids = by_sequence ? pointer<int32_t>(args.sequence_ids) : nullptr,
                 .forced_ids = args.forced_ids.data,
                 .forced_ids_are_64_bit = args.forced_ids.dtype == DType::kI64,
                 .T = T,
                 .num_sequences = output.statistics.num_sequences,
                 .rules = rules_,
                 .choice = choice_rules(config_),
                 .expert_ids = pointer<int32_t>(output.expert_ids),
                 .weights = pointer<float>(output.weights),
                 .sequences = pointer<int32_t>(output.sequences),
                 .counts = counts},
                call.handle());
  return output;
}

ScopeCounts DeviceBackend::scope_counts(BalanceScope scope, const RouterOutput& output,
                                        const LossCounts& counts) const {
  const bool is_for_z = scope == BalanceScope::kBatch && config_.z_loss_coeff != 0.0;
  if (config_.aux_coeff(scope) == 0.0 && !is_for_z) return {};
  const RouterStatistics& statistics = counts_of(scope, output, counts);
  const int64_t B = statistics.num_sequences;
  const auto* routes = static_cast<const int64_t*>(statistics.device_counts.view.data);
  return {.coeff = config_.aux_coeff(scope),
          .routes = routes,
          .tokens = routes + B * rules_.E,
          .num_sequences = B};
}

BalanceArgs DeviceBackend::balance_args(const RouterOutput& output,
                                        const LossCounts& counts) const {
  return {.batch = scope_counts(BalanceScope::kBatch, output, counts),
          .sequence = scope_counts(BalanceScope::kSequence, output, counts),
          .global_batch = scope_counts(BalanceScope::kGlobalBatch, output, counts),
          .z_coeff = config_.z_loss_coeff,
          .total_sequences = counts.total_sequences,
          .total_tokens = counts.total_tokens};
}

RouterLosses DeviceBackend::losses(const RouterOutput& output, const LossCounts& counts,
                                   Stream stream) {
  const cuda::DeviceCall call(calls_, stream);
  const Buffer partial_sums = call.take(bytes_of<double>(loss_blocks(output.T) * 4));
  const Buffer values = call.take(bytes_of<double>(5));
  launch_losses({.logits = pointer<float>(output.logits),
                 .sequences = pointer<int32_t>(output.sequences),
                 .T = output.T,
                 .rules = rules_,
                 .balance = balance_args(output, counts),
                 .partial_sums = pointer<double>(partial_sums),
                 .values = pointer<double>(values)},
                call.handle());
  RouterLosses losses;
  losses.device_values = {.view = values.view(DType::kF64, {5}), .owner = values.owner()};
  return losses;
}

// Whether the kernels for sm_90a compute the gradients of x and of the gate. They have the bits of
// the others.
bool DeviceBackend::takes_parts(const RouterBackwardArgs& args) const {
  const bool is_bf16 = args.x.dtype == DType::kBF16 && args.gate.weight.dtype == DType::kBF16;
  return has_hopper_kernels_ && is_bf16 && config_.jitter == 0.0 && args.output->T > 0 &&
         rules_.E <= kMostExpertsInParts && shared_memory_ >= hopper::kGradSharedBytes &&
         is_aligned(args.x) && is_aligned(args.gate.weight) &&
         (!args.grad_x.given() || is_aligned(args.grad_x));
}

void DeviceBackend::write_gradients(const RouterBackwardArgs& args, const GradLogits& grads,
                                    const cuda::DeviceCall& call) {
  const RouterOutput& output = *args.output;
  const bool has_gate = args.grad_gate.given();
  const TokenSlices slices = gate_slices(output.T, rules_.E, config_.width);
  const int64_t num_sums =
      has_gate && slices.count > 1 ? slices.count * rules_.E * config_.width : 0;
  const Buffer slice_sums = call.take(bytes_of<float>(num_sums));
  const GradXArgs of_x{.grad_logits = grads.values,
                       .gate = args.gate.weight.data,
                       .gate_dtype = args.gate.weight.dtype,
                       .jitter = jitter_of(output),
                       .T = output.T,
                       .E = rules_.E,
                       .D = config_.width,
                       .accumulates = args.accumulate_x,
                       .grad_x = args.grad_x.data,
                       .x_dtype = args.x.dtype};
  const GradGateArgs of_gate{.grad_logits = grads.values,
                             .x = args.x.data,
                             .x_dtype = args.x.dtype,
                             .jitter = jitter_of(output),
                             .sequences = pointer<int32_t>(output.sequences),
                             .T = output.T,
                             .E = rules_.E,
                             .D = config_.width,
                             .accumulates = args.accumulate_gate,
                             .slices = slices,
                             .slice_sums = pointer<float>(slice_sums),
                             .grad_gate = pointer<float>(args.grad_gate)};
  if (grads.parts.values != nullptr) {
    if (has_gate || args.grad_x.given()) {
      hopper::launch_gradients(grads.parts, of_x, of_gate, tensor_maps_, call.handle());
    }
  } else {
    if (args.grad_x.given()) launch_grad_x(of_x, call.handle());
    if (has_gate) launch_grad_gate(of_gate, call.handle());
  }
}

void DeviceBackend::write_grad_bias(const RouterBackwardArgs& args, const float* grad_logits,
                                    const cuda::DeviceCall& call) {
  const TokenSlices slices = bias_slices(args.output->T);
  const Buffer slice_sums = call.take(bytes_of<double>(slices.count * rules_.E));
  launch_grad_bias({.grad_logits = grad_logits,
                    .T = args.output->T,
                    .E = rules_.E,
                    .accumulates = args.accumulate_gate,
                    .slices = slices,
                    .slice_sums = pointer<double>(slice_sums),
                    .grad_bias = pointer<float>(args.grad_bias)},
                   call.handle());
}

void DeviceBackend::backward(const RouterBackwardArgs& args) {
  const cuda::DeviceCall call(calls_, args.stream);
  const RouterOutput& output = *args.output;
  GradLogits grads{.values = pointer<float>(args.grad_logits)};
  Buffer values, parts;
  if (takes_parts(args)) {
    grads.parts.pitch = round_up(rules_.E, 8);
    parts = call.take(bytes_of<BF16>(kNumParts * output.T * grads.parts.pitch));
    grads.parts.values = pointer<BF16>(parts);
  }
  const bool needs_values = grads.parts.values == nullptr || args.grad_bias.given();
  if (grads.values == nullptr && needs_values) {
    values = call.take(bytes_of<float>(output.T * rules_.E));
    grads.values = pointer<float>(values);
  }
  launch_grad_logits({.logits = pointer<float>(output.logits),
                      .expert_ids = pointer<int32_t>(output.expert_ids),
                      .sequences = pointer<int32_t>(output.sequences),
                      .grad_weights = pointer<float>(args.grad_weights),
                      .T = output.T,
                      .rules = rules_,
                      .balance = balance_args(output, args.counts),
                      .grad_losses = static_cast<float>(args.grad_losses),
                      .grad_logits = grads.values,
                      .parts = grads.parts},
                     call.handle());
  write_gradients(args, grads, call);
  if (args.grad_bias.given()) write_grad_bias(args, grads.values, call);
}

RouterStatistics DeviceBackend::sum(const RouterStatistics& a, const RouterStatistics& b,
                                    Stream stream) {
  const cuda::DeviceCall call(calls_, stream);
  RouterStatistics total;
  total.num_sequences = a.num_sequences;
  total.device_counts = take_counts(a.num_sequences, call);
  launch_sum_counts({.a = static_cast<const int64_t*>(a.device_counts.view.data),
                     .b = static_cast<const int64_t*>(b.device_counts.view.data),
                     .count = total.device_counts.view.num_elements(),
                     .sum = static_cast<int64_t*>(total.device_counts.view.data)},
                    call.handle());
  return total;
}

}  // namespace

std::unique_ptr<Backend> make_device_backend(const RouterConfig& config, Device device,
                                             std::optional<int64_t> shared_memory) {
  check_device_config(config);
  return std::make_unique<DeviceBackend>(config, device, shared_memory);
}

void read_device(const ConstTensorView& tensor, std::span<std::byte> to, Stream stream) {
  const cuda::CallGuard guard(tensor.device.index);
  const cudaStream_t handle = cuda::handle_of(stream);
  // Ranks that are threads use their own streams in place of the default one.
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy;
  const cudaStream_t own = is_default ? cudaStreamPerThread : handle;
  CROSSDOCK_CHECK(
      !cuda::is_capturing(own) && !cuda::is_capturing(handle),
      "on_host waits for the GPU, which is not possible while a graph is captured; call "
      "it after a replay");
  // A copy queued behind kernels that wait for other ranks could keep those from launching theirs.
  CROSSDOCK_CUDA(cudaStreamSynchronize(own));
  CROSSDOCK_CUDA(
      cudaMemcpyAsync(to.data(), tensor.data, to.size(), cudaMemcpyDeviceToHost, handle));
  CROSSDOCK_CUDA(cudaStreamSynchronize(handle));
}

void sum_batches_on_device(const SumBatchesArgs& args, Stream stream) {
  const cuda::CallGuard guard(args.sum.device.index);
  launch_sum_batches({.counts = pointer<int64_t>(args.counts),
                      .num_batches = args.counts.num_rows(),
                      .num_sequences = args.num_sequences,
                      .E = args.sum.num_elements() - 1,
                      .sum = pointer<int64_t>(args.sum)},
                     cuda::handle_of(stream));
}

void update_bias_on_device(const TensorView& bias, const RouterStatistics& statistics,
                           const BiasUpdate& update, Stream stream) {
  const cuda::CallGuard guard(bias.device.index);
  launch_update_bias({.routes = static_cast<const int64_t*>(statistics.device_counts.view.data),
                      .num_sequences = statistics.num_sequences,
                      .E = bias.num_rows(),
                      .rate = update.rate,
                      .centred = update.centred,
                      .bias = pointer<float>(bias)},
                     cuda::handle_of(stream));
}

}  // namespace crossdock::router
