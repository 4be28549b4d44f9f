#include "layer/layer_args.hpp"

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <optional>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/moe_layer.hpp"
#include "layer/layer_parts.hpp"
#include "layer/route_counts.hpp"
#include "router/backend.hpp"

namespace crossdock {
namespace {

using Tensors = std::vector<NamedTensor>;

void append(const Tensors& more, Tensors& tensors) {
  tensors.insert(tensors.end(), more.begin(), more.end());
}

Tensors list_parameters(const MoeLayerWeights& weights) {
  return {{"gate", weights.gate.weight},
          {"gate's bias", weights.gate.bias},
          {"expert_bias", weights.expert_bias},
          {"w1", weights.experts.w1},
          {"w2", weights.experts.w2},
          {"b1", weights.experts.b1},
          {"b2", weights.experts.b2},
          {"w1 of shared experts", weights.shared.w1},
          {"w2 of shared experts", weights.shared.w2},
          {"b1 of shared experts", weights.shared.b1},
          {"b2 of shared experts", weights.shared.b2}};
}

Tensors list_gradients(const ExpertGradients& experts, const ExpertGradients& shared) {
  return {{"grad of w1", experts.w1},
          {"grad of w2", experts.w2},
          {"grad of b1", experts.b1},
          {"grad of b2", experts.b2},
          {"grad of w1 of shared experts", shared.w1},
          {"grad of w2 of shared experts", shared.w2},
          {"grad of b1 of shared experts", shared.b1},
          {"grad of b2 of shared experts", shared.b2}};
}

// Rows that the gradients of the experts are computed from.
Tensors list_saved(const MoeSaved& saved) {
  return {{"rows of saved", saved.sent.rows.view},
          {"row weights of saved", saved.sent.row_weights.view},
          {"grad_y of saved", saved.grad_y.rows.view},
          {"grad_y's row weights of saved", saved.grad_y.row_weights.view}};
}

// The dispatcher would refuse the plan of another layer too, but only when the call has begun.
void check_origin(const char* name, const LayerParts& parts, const MoeDecision& decision) {
  router::check_origin(name, parts.router.config(), *decision.router);
  const PlanData& plan = decision.plan.data();
  CROSSDOCK_CHECK(plan.config.get() == &parts.dispatcher.config(), name,
                  " must come from a forward of this layer (rank ", parts.group.rank(), " of ",
                  parts.group.size(), "), got it from another layer (rank ", plan.rank, " of ",
                  plan.P, ")");
}

// Backward uses the decision's numbers, so they must be where the tokens are.
void check_place(const MoeDecision& decision, Device device) {
  CROSSDOCK_CHECK(decision.plan.device() == device,
                  "x must be on the device of the forward that decision comes from");
  CROSSDOCK_CHECK(decision.statistics.is_on_device() == !device.is_cpu(),
                  "decision must have its numbers where the tokens are, ",
                  device.is_cpu() ? "in host memory"
                                  : "on the GPU; pass the decision of the forward, "
                                    "not a copy by on_host");
}

void check_outputs(const MoeForwardArgs& args) {
  Tensors inputs = {{"x", args.x},
                    {"mask", args.mask},
                    {"sequence_ids", args.sequence_ids},
                    {"forced_ids", args.forced_ids},
                    {"token_ids", args.token_ids}};
  append(list_parameters(args.weights), inputs);
  check_no_overlap({{"out", args.out}}, inputs);
}

void check_outputs(const MoeBackwardArgs& args) {
  Tensors inputs = {{"x", args.x}, {"grad_out", args.grad_out}};
  append(list_parameters(args.weights), inputs);
  append(list_saved(*args.saved), inputs);
  Tensors outputs = {{"grad_x", args.grad_x},
                     {"grad of gate", args.grads.gate},
                     {"grad of gate_bias", args.grads.gate_bias}};
  append(list_gradients(args.grads.experts, args.grads.shared), outputs);
  check_no_overlap(outputs, inputs);
}

void check_outputs(const MoeBackwardDwArgs& args) {
  Tensors inputs = {{"x", args.x}, {"grad_out", args.grad_out}};
  append(list_saved(*args.saved), inputs);
  check_no_overlap(list_gradients(args.experts, args.shared), inputs);
}

}  // namespace

void check_outputs(const LayerParts& parts, const MoeForwardArgs& args) {
  const Shape tokens{args.x.num_rows(), parts.config.router.width};
  if (args.out.given()) {
    check_tensor("out", args.out, args.x.device, parts.config.experts.dtype, tokens);
  }
  check_outputs(args);
}

void check_outputs(const LayerParts& parts, const MoeBackwardArgs& args) {
  const Shape tokens{args.x.num_rows(), parts.config.router.width};
  if (args.grad_x.given()) {
    check_tensor("grad_x", args.grad_x, args.x.device, parts.config.experts.dtype, tokens);
  }
  CROSSDOCK_CHECK(args.saved != nullptr, "saved must come from a forward, got none");
  check_outputs(args);
}

void check_args(const LayerParts& parts, const MoeForwardArgs& args) {
  const MoeLayerConfig& config = parts.config;
  const Shape tokens{args.x.num_rows(), config.router.width};
  const Device device = args.x.device;
  if (!device.is_cpu()) parts.check_gpu(device);
  check_tensor("x", args.x, device, config.experts.dtype, tokens);
  CROSSDOCK_CHECK(args.total_sequences >= 0, "total_sequences must not be negative, got ",
                  args.total_sequences);
  if (args.out.given()) check_tensor("out", args.out, device, config.experts.dtype, tokens);
  parts.experts.check(args.weights.experts, device);
  if (parts.shared) parts.shared->experts().check(args.weights.shared, device);
  check_outputs(args);
  if (args.decision == nullptr) return check_earlier(config.router, args.earlier, device);
  CROSSDOCK_CHECK(args.decision->router != nullptr && args.decision->plan.valid(),
                  "decision must come from an earlier forward, got an empty one");
  check_origin("decision", parts, *args.decision);
  CROSSDOCK_CHECK(args.decision->plan.num_tokens() == tokens[0], "decision is for ",
                  args.decision->plan.num_tokens(), " tokens, but x has ", tokens[0],
                  "; pass the tokens of the forward that it comes from");
  check_place(*args.decision, device);
}

void check_args(const LayerParts& parts, const MoeBackwardArgs& args) {
  CROSSDOCK_CHECK(args.saved != nullptr && args.saved->sent.rows.view.given() &&
                      !args.saved->grad_y.rows.view.given(),
                  "saved must come from a forward that has had no backward yet");
  parts.experts.check(args.saved->experts);
  if (parts.shared) parts.shared->experts().check(args.saved->shared);
  check_origin("saved", parts, args.saved->decision);
  const DType dtype = parts.config.experts.dtype;
  const DType sums = args.saved->decision.router->weight_dtype;
  const int64_t E = parts.config.router.num_experts;
  const int64_t D = parts.config.router.width;
  const Shape tokens{args.saved->decision.plan.num_tokens(), D};
  const Device device = args.saved->decision.plan.device();
  check_place(args.saved->decision, device);
  check_tensor("x", args.x, device, dtype, tokens);
  check_tensor("grad_out", args.grad_out, device, dtype, tokens);
  if (args.grad_x.given()) check_tensor("grad_x", args.grad_x, device, dtype, tokens);
  if (args.grads.gate.given()) check_tensor("grad of gate", args.grads.gate, device, sums, {E, D});
  if (args.grads.gate_bias.given()) {
    check_tensor("grad of gate_bias", args.grads.gate_bias, device, sums, {E});
  }
  const bool accumulate = args.accumulate && !args.delay_dw;
  parts.experts.check(args.weights.experts, device);
  parts.experts.check(args.grads.experts, device, accumulate);
  check_outputs(args);
  if (!parts.shared) return;
  parts.shared->experts().check(args.weights.shared, device);
  parts.shared->experts().check(args.grads.shared, device, accumulate);
}

void check_args(const LayerParts& parts, const MoeBackwardDwArgs& args) {
  CROSSDOCK_CHECK(args.saved != nullptr && args.saved->grad_y.rows.view.given(),
                  "saved must come from a backward with delay_dw");
  check_origin("saved", parts, args.saved->decision);
  check_outputs(args);
}

namespace {

// B * L for tokens [B, L, D]; -1 for any other shape.
int64_t num_tokens(const Shape& x) {
  if (x.rank() != 3) return -1;
  return product_within(kMaxBytes, {x[0], x[1]}).value_or(-1);
}

// A tensor [B, L], or [B, L, n], of the tokens x [B, L, D].
template <typename View>
View flat(View tensor, const Shape& x) {
  const Shape& shape = tensor.shape;
  const int64_t T = num_tokens(x);
  if (T < 0 || shape.rank() < 2 || shape[0] != x[0] || shape[1] != x[1]) return tensor;
  if (shape.rank() == 2) {
    tensor.shape = {T};
  } else if (shape.rank() == 3) {
    tensor.shape = {T, shape[2]};
  }
  return tensor;
}

}  // namespace

MoeForwardArgs flat(const MoeForwardArgs& args) {
  MoeForwardArgs result = args;
  const Shape& x = args.x.shape;
  result.x = flat(args.x, x);
  result.out = flat(args.out, x);
  result.mask = flat(args.mask, x);
  result.sequence_ids = flat(args.sequence_ids, x);
  result.forced_ids = flat(args.forced_ids, x);
  result.token_ids = flat(args.token_ids, x);
  return result;
}

MoeBackwardArgs flat(const MoeBackwardArgs& args) {
  MoeBackwardArgs result = args;
  const Shape& x = args.x.shape;
  result.x = flat(args.x, x);
  result.grad_out = flat(args.grad_out, x);
  result.grad_x = flat(args.grad_x, x);
  return result;
}

MoeBackwardDwArgs flat(const MoeBackwardDwArgs& args) {
  MoeBackwardDwArgs result = args;
  const Shape& x = args.x.shape;
  result.x = flat(args.x, x);
  result.grad_out = flat(args.grad_out, x);
  return result;
}

TensorView shaped_like(const ConstTensorView& x, const TensorView& result) {
  return {result.data, result.dtype, x.shape, result.device};
}

namespace {

// Sets a field that repeats one of the router's; 0 means "not given".
void fill(const char* name, int64_t value, int64_t& field) {
  CROSSDOCK_CHECK(field == 0 || field == value, name, " (", field, ") must equal the router's (",
                  value, "); leave it out");
  field = value;
}

int64_t count_local_experts(const MoeLayerConfig& config, const Group& group) {
  const DispatchConfig& dispatch = config.dispatch;
  const int ep = group.size() / static_cast<int>(config.etp);
  const int rank = group.rank() / static_cast<int>(config.etp);
  if (!dispatch.placement.empty()) {
    return std::count(dispatch.placement.begin(), dispatch.placement.end(), rank);
  }
  return first_expert(dispatch.num_experts, ep, rank + 1) -
         first_expert(dispatch.num_experts, ep, rank);
}

}  // namespace

MoeLayerConfig fill_in(MoeLayerConfig config, const Group& group) {
  const RouterConfig& router = config.router;
  fill("dispatch.num_experts", router.num_experts, config.dispatch.num_experts);
  fill("dispatch.top_k", router.top_k, config.dispatch.top_k);
  fill("dispatch.width", router.width, config.dispatch.width);
  fill("experts.width", router.width, config.experts.width);
  CROSSDOCK_CHECK(config.shared_inner >= 0 && config.shared_inner <= kMaxWidth,
                  "shared_inner must be in [0, ", kMaxWidth, "], got ", config.shared_inner);
  CROSSDOCK_CHECK(config.overlap_chunks >= 1, "overlap_chunks must be at least 1, got ",
                  config.overlap_chunks);
  CROSSDOCK_CHECK(config.etp >= 1 && group.size() % config.etp == 0, "etp (", config.etp,
                  ") must be at least 1 and divide the number of ranks of the group (",
                  group.size(), ")");
  config.router.dtype = config.experts.dtype;
  config.experts.num_local_experts = count_local_experts(config, group);
  return config;
}

std::string config_text(const MoeLayerConfig& config) {
  const ExpertsConfig& experts = config.experts;
  return concat(std::setprecision(17), router::config_text(config.router), ";inner=", experts.inner,
                ";activation=", name_of(experts.activation), ";interleaved=", experts.interleaved,
                ";limit=", experts.limit, ";weights_in=", static_cast<int>(experts.weights_in),
                ";shared_inner=", config.shared_inner, ";overlap_chunks=", config.overlap_chunks,
                ";etp=", config.etp, ";allow_equal_tokens=", config.allow_equal_tokens);
}

MoeDecision MoeDecision::on_host(Stream stream) const {
  if (!statistics.is_on_device()) return *this;
  MoeDecision copy = *this;
  copy.statistics = statistics.on_host(stream);
  for (std::optional<RouterStatistics>* narrower :
       {&copy.batch_statistics, &copy.sequence_statistics}) {
    if (*narrower) *narrower = (*narrower)->on_host(stream);
  }
  copy.losses = losses.on_host(stream);
  copy.device_load = {};
  copy.load = device_load.on_host(stream).routes_per_expert;
  copy.total_tokens = copy.batch_statistics->num_tokens.front();
  if (copy.total_sequences == 0.0) {
    const std::optional<RouterStatistics>& counted =
        copy.sequence_statistics ? copy.sequence_statistics : copy.batch_statistics;
    const std::vector<int64_t>& tokens = counted->num_tokens;
    copy.total_sequences =
        static_cast<double>(std::ssize(tokens) - std::count(tokens.begin(), tokens.end(), 0));
  }
  copy.dropped = drops_of_experts(plan, std::ssize(copy.load));
  return copy;
}

}  // namespace crossdock
