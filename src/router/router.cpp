#include "crossdock/router.hpp"

#include <algorithm>
#include <string>

#include "core/check.hpp"
#include "core/pointer.hpp"
#include "core/tensor_check.hpp"
#include "router/balance_losses.hpp"
#include "router/router_pass.hpp"

namespace crossdock {
namespace {

DType sum_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
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
  CROSSDOCK_CHECK(config.jitter >= 0.0 && config.jitter < 1.0, "jitter must be in [0, 1), got ",
                  config.jitter);
}

void check_gate(const RouterConfig& config, const GateWeights& gate) {
  const bool is_f64 = config.dtype == DType::kF64;
  CROSSDOCK_CHECK(is_summable(gate.weight.dtype) && (gate.weight.dtype == DType::kF64) == is_f64,
                  "the gate must be fp64 for fp64 tokens, else fp32, bf16 or fp16, got ",
                  name_of(gate.weight.dtype));
  check_tensor("the gate", gate.weight, gate.weight.dtype, Shape{config.num_experts, config.width});
  if (gate.bias.given()) {
    check_tensor("the gate's bias", gate.bias, gate.weight.dtype, Shape{config.num_experts});
  }
}

void check_sequences(const RouterConfig& config, const RouteArgs& args, int64_t T) {
  CROSSDOCK_CHECK(args.num_sequences >= 1, "num_sequences must be at least 1, got ",
                  args.num_sequences);
  if (!args.sequence_ids.given()) {
    CROSSDOCK_CHECK(!config.counts(BalanceScope::kSequence) || args.num_sequences == 1 || T == 0,
                    "sequence_ids must be given for the loss of ", args.num_sequences,
                    " sequences");
    return;
  }
  check_tensor("sequence_ids", args.sequence_ids, DType::kI32, Shape{T});
  const auto ids = args.sequence_ids.as<int32_t>();
  for (int64_t t = 0; t < T; ++t) {
    const int32_t id = ids[static_cast<size_t>(t)];
    CROSSDOCK_CHECK(id >= 0 && id < args.num_sequences, "sequence_ids[", t, "] must be in [0, ",
                    args.num_sequences, "), got ", id);
  }
}

template <typename Id>
void check_forced_ids(const RouterConfig& config, std::span<const Id> ids, const bool* mask) {
  const int64_t K = config.top_k;
  const int64_t E = config.num_experts;
  std::vector<int64_t> last_token(static_cast<size_t>(E), -1);  // [E] that named the expert
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

void check_route_args(const RouterConfig& config, const RouteArgs& args) {
  const int64_t T = args.x.num_rows();
  check_tensor("x", args.x, config.dtype, Shape{T, config.width});
  check_gate(config, args.gate);
  if (args.expert_bias.given()) {
    check_tensor("expert_bias", args.expert_bias, sum_dtype(config.dtype),
                 Shape{config.num_experts});
  }
  if (args.mask.given()) check_tensor("mask", args.mask, DType::kBool, Shape{T});
  if (args.token_ids.given()) check_tensor("token_ids", args.token_ids, DType::kI64, Shape{T});
  check_sequences(config, args, T);
  if (!args.forced_ids.given()) return;
  const bool is_wide = args.forced_ids.dtype == DType::kI64;
  check_tensor("forced_ids", args.forced_ids, is_wide ? DType::kI64 : DType::kI32,
               Shape{T, config.top_k});
  const bool* mask = pointer<bool>(args.mask);
  if (is_wide) {
    check_forced_ids(config, args.forced_ids.as<int64_t>(), mask);
  } else {
    check_forced_ids(config, args.forced_ids.as<int32_t>(), mask);
  }
}

void check_backward_args(const RouterConfig& config, const RouterBackwardArgs& args) {
  CROSSDOCK_CHECK(args.output != nullptr, "output must be the result of route, got none");
  const int64_t T = args.output->T;
  const int64_t E = config.num_experts;
  const DType sums = sum_dtype(config.dtype);
  check_tensor("x", args.x, config.dtype, Shape{T, config.width});
  check_gate(config, args.gate);
  if (args.grad_weights.given()) {
    check_tensor("grad_weights", args.grad_weights, sums, Shape{T, config.top_k});
  }
  if (args.grad_x.given())
    check_tensor("grad_x", args.grad_x, config.dtype, Shape{T, config.width});
  if (args.grad_gate.given()) {
    check_tensor("grad_gate", args.grad_gate, sums, Shape{E, config.width});
  }
  if (args.grad_bias.given()) check_tensor("grad_bias", args.grad_bias, sums, Shape{E});
  if (args.grad_logits.given()) check_tensor("grad_logits", args.grad_logits, sums, Shape{T, E});
  router::check_counts(config, *args.output, args.counts);
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

// Calls work(pass) with the RouterPass in the dtype's sum type, float or double.
template <typename Work>
auto with_pass(const RouterConfig& config, ThreadPool& pool, BufferPool& buffers,
               const Work& work) {
  if (config.dtype == DType::kF64) return work(router::RouterPass<double>(config, pool, buffers));
  return work(router::RouterPass<float>(config, pool, buffers));
}

}  // namespace

std::vector<int64_t> RouterStatistics::load() const {
  const size_t E =
      routes_per_expert.size() / static_cast<size_t>(std::max<int64_t>(num_sequences, 1));
  std::vector<int64_t> sums(E, 0);
  for (size_t begin = 0; begin < routes_per_expert.size(); begin += E) {
    for (size_t e = 0; e < E; ++e) sums[e] += routes_per_expert[begin + e];
  }
  return sums;
}

void RouterStatistics::add(const RouterStatistics& other) {
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

Router::Router(RouterConfig config, std::shared_ptr<ThreadPool> pool)
    : config_(config),
      pool_(pool ? std::move(pool) : ThreadPool::process_wide()),
      buffers_(std::make_shared<BufferPool>()) {
  check_config(config_);
}

RouterOutput Router::route(const RouteArgs& args) const {
  check_route_args(config_, args);
  return with_pass(config_, *pool_, *buffers_, [&](auto pass) { return pass.route(args); });
}

RouterLosses Router::losses(const RouterOutput& output, const LossCounts& counts) const {
  router::check_counts(config_, output, counts);
  return with_pass(config_, *pool_, *buffers_,
                   [&](auto pass) { return pass.losses(output, counts); });
}

void Router::backward(const RouterBackwardArgs& args) const {
  check_backward_args(config_, args);
  with_pass(config_, *pool_, *buffers_, [&](auto pass) { pass.backward(args); });
}

}  // namespace crossdock
