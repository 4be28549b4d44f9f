#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"

namespace crossdock::capi {
namespace {

MoeLayerConfig to_layer_config(const crossdock_layer_config& given, std::optional<Error>& refusal) {
  MoeLayerConfig config;
  config.router = to_config(read_struct("crossdock_router_config", given.router), refusal);
  config.experts = to_config(read_struct("crossdock_experts_config", given.experts), refusal);
  config.experts.num_local_experts = 0;  // the layer sets it
  const auto dispatch = read_optional("crossdock_dispatch_config", given.dispatch);
  config.dispatch = to_config(dispatch, config.router.num_experts, refusal);
  if (dispatch.strategy != nullptr) config.strategy = dispatch.strategy;
  config.shared_inner = given.shared_inner;
  config.overlap_shared = given.serial_shared == 0;
  config.overlap_chunks = or_default<int64_t>(given.overlap_chunks, 1);
  config.etp = or_default<int64_t>(given.etp, 1);
  config.allow_equal_tokens = given.allow_equal_tokens != 0;
  return config;
}

MoeLayerWeights to_layer_weights(const crossdock_layer_weights& given) {
  return {.gate = {.weight = to_view("weights.gate", given.gate),
                   .bias = to_view("weights.gate_bias", given.gate_bias)},
          .expert_bias = to_view("weights.expert_bias", given.expert_bias),
          .experts = to_weights("weights.experts", given.experts),
          .shared = to_weights("weights.shared", given.shared)};
}

MoeLayerGradients to_layer_gradients(const crossdock_layer_gradients& given) {
  return {.gate = to_view("grads.gate", given.gate),
          .gate_bias = to_view("grads.gate_bias", given.gate_bias),
          .experts = to_gradients("grads.experts", given.experts),
          .shared = to_gradients("grads.shared", given.shared)};
}

MoeForwardArgs to_args(const crossdock_layer_forward_args& given, const crossdock_output& out) {
  MoeForwardArgs args;
  args.weights = to_layer_weights(given.weights);
  args.x = to_view("x", given.x);
  args.out = given_output("out", out);
  args.mask = to_view("mask", given.mask);
  args.sequence_ids = to_view("sequence_ids", given.sequence_ids);
  args.num_sequences = or_default<int64_t>(given.num_sequences, 1);
  args.total_sequences = given.total_sequences;
  args.forced_ids = to_view("forced_ids", given.forced_ids);
  args.token_ids = to_view("token_ids", given.token_ids);
  args.jitter_seed = given.jitter_seed;
  if (given.decision != nullptr) {
    args.decision = &handle("decision", given.decision).saved.decision;
  }
  if (given.earlier != nullptr) {
    args.earlier = &handle("earlier", given.earlier).saved.decision.statistics;
  }
  return args;
}

// The plan that a call uses, which the ranks compare; not valid if there is none.
Plan plan_of(const crossdock_layer_saved* saved) {
  return is_usable(saved) ? saved->saved.decision.plan : Plan();
}

Plan plan_of(const crossdock_layer_forward_args* args) {
  constexpr size_t kLeastBytes = offsetof(crossdock_layer_forward_args, earlier);
  const bool has_field =
      args != nullptr && is_struct_size(args->struct_size) && args->struct_size >= kLeastBytes;
  return has_field ? plan_of(args->decision) : Plan();
}

// A struct of an older version does not have all of these fields.
void set_losses(const RouterLosses& losses, crossdock_layer_forward_result& result) {
  using Outputs = crossdock_layer_forward_result;
  const auto set = [&](double Outputs::*field, double value) {
    if (double* out = find_field(&result, field)) *out = value;
  };
  set(&Outputs::aux_loss, losses.aux);
  set(&Outputs::z_loss, losses.z);
  set(&Outputs::aux_batch_loss, losses.aux_terms.batch);
  set(&Outputs::aux_sequence_loss, losses.aux_terms.sequence);
  set(&Outputs::aux_global_batch_loss, losses.aux_terms.global_batch);
}

// Sets the tensor of losses on a GPU. `kept` is null if the caller does not keep them alive.
void set_device_losses(const crossdock_layer_saved* kept, crossdock_layer_forward_result& result) {
  crossdock_tensor* const out = find_field(&result, &crossdock_layer_forward_result::device_losses);
  if (out == nullptr) return;
  const bool is_given = kept != nullptr && kept->saved.decision.losses.is_on_device();
  *out = is_given ? from_view(kept->saved.decision.losses.device_values.view) : crossdock_tensor{};
}

GroupPtr group_or_null(const char* name, crossdock_group* group) {
  return group != nullptr ? handle(name, group).shared : nullptr;
}

void refuse(Group& group, const char* operation, const Error& error) {
  refusal_of([&] { group.agree({.operation = operation, .refusal = &error}); });
}

// Like convert. Ranks that hold the same tokens compare them before they agree in the layer's
// group, so a rank that cannot convert its arguments refuses there first.
template <typename Convert>
void convert_replicated(const crossdock_layer& layer, const char* operation, const Call& call,
                        const Convert& body) {
  const std::optional<Error> refusal = conversion_refusal(body);
  if (!refusal) return;
  if (layer.others.replicated) refuse(layer.others.replicated->open(), operation, *refusal);
  convert(call, [&] { throw *refusal; });
}

// If a forward is refused in the layer's group, ranks of its counting groups are still waiting, so
// it must be refused there too.
template <typename Convert>
void convert_forward(const crossdock_layer& layer, const Call& call, const Convert& body) {
  try {
    convert_replicated(layer, "replicate", call, body);
  } catch (const Error& error) {
    const bool all_refuse = error.code() != ErrorCode::kMismatch && !call.group.is_poisoned();
    if (all_refuse && call.subject == 0) {
      for (Group* other : layer.layer.counting_groups()) refuse(*other, "count", error);
    }
    throw;
  }
}

}  // namespace
}  // namespace crossdock::capi

using namespace crossdock;
using capi::guarded;
using capi::handle;
using capi::pointee;

crossdock_status crossdock_layer_create(crossdock_group* group,
                                        const crossdock_layer_config* config,
                                        crossdock_layer** layer) {
  return guarded([&] {
    const capi::GroupPtr& members = handle("group", group).shared;
    crossdock_layer*& made = pointee("layer", layer);
    const auto given = capi::read_struct("crossdock_layer_config", config);
    const capi::LayerGroups others{
        .counting = capi::group_or_null("counting_group", given.counting_group),
        .sequences = capi::group_or_null("sequence_group", given.sequence_group),
        .replicated = capi::group_or_null("replicated_over", given.replicated_over)};
    std::optional<Error> refusal;
    made = new crossdock_layer(members, others, capi::to_layer_config(given, refusal));
    made->refusal = std::move(refusal);
  });
}

void crossdock_layer_destroy(crossdock_layer* layer) {
  capi::destroy(layer);
}

crossdock_status crossdock_layer_num_local_experts(const crossdock_layer* layer,
                                                   int64_t* num_local_experts) {
  return guarded([&] {
    pointee("num_local_experts", num_local_experts) =
        handle("layer", layer).layer.config().experts.num_local_experts;
  });
}

crossdock_status crossdock_layer_set_device_options(crossdock_layer* layer,
                                                    const crossdock_device_options* options) {
  return guarded([&] {
    crossdock_layer& changed = handle("layer", layer);
    const auto given = capi::read_struct("crossdock_device_options", options);
    changed.layer.set_device_options({.stream = {given.stream},
                                      .max_sms = given.max_sms,
                                      .max_begun_sms = given.max_begun_sms,
                                      .nccl_comm = given.nccl_comm});
    changed.stream = {given.stream};
  });
}

crossdock_status crossdock_layer_forward(crossdock_layer* layer,
                                         const crossdock_layer_forward_args* args,
                                         crossdock_layer_forward_result* result,
                                         crossdock_layer_saved** saved) {
  return guarded([&] {
    crossdock_layer& called = handle("layer", layer);
    MoeForwardArgs converted;
    std::unique_ptr<crossdock_layer_saved> kept;
    const capi::Call call =
        capi::call_of(called.layer, called.group->open(), "route", capi::plan_of(args));
    capi::convert_forward(called, call, [&] {
      capi::throw_if_set(called.refusal);
      const auto outputs = capi::read_struct("crossdock_layer_forward_result", result,
                                             offsetof(crossdock_layer_forward_result, aux_loss));
      converted =
          capi::to_args(capi::read_struct("crossdock_layer_forward_args", args), outputs.out);
      kept = std::make_unique<crossdock_layer_saved>(called);
    });
    MoeForwardResult made = called.layer.forward(converted);
    kept->saved = std::move(made.saved);
    const capi::Result results[] = {{&result->out, &made.out}};
    capi::set_outputs(results, {.group = called.group, .stream = called.stream});
    capi::set_losses(kept->saved.decision.losses, *result);
    capi::set_device_losses(saved != nullptr ? kept.get() : nullptr, *result);
    if (saved != nullptr) *saved = kept.release();
  });
}

crossdock_status crossdock_layer_backward(crossdock_layer* layer,
                                          const crossdock_layer_backward_args* args,
                                          crossdock_layer_saved* saved, crossdock_output* grad_x) {
  return guarded([&] {
    crossdock_layer& called = handle("layer", layer);
    MoeBackwardArgs converted;
    const capi::Call call =
        capi::call_of(called.layer, called.group->open(), "layer_backward", capi::plan_of(saved));
    capi::convert_replicated(called, "replicate_grad", call, [&] {
      const auto given = capi::read_struct("crossdock_layer_backward_args", args);
      converted = {.weights = capi::to_layer_weights(given.weights),
                   .x = capi::to_view("x", given.x),
                   .grad_out = capi::to_view("grad_out", given.grad_out),
                   .saved = &handle("saved", saved).saved,
                   .grads = capi::to_layer_gradients(given.grads),
                   .accumulate = given.accumulate != 0,
                   .delay_dw = given.delay_dw != 0,
                   .grad_losses = given.grad_losses != nullptr ? *given.grad_losses : 1.0,
                   .grad_x = capi::given_output("grad_x", grad_x)};
    });
    OwnedTensor made = called.layer.backward(converted);
    const capi::Result results[] = {{grad_x, &made}};
    capi::set_outputs(results, {.group = called.group, .stream = called.stream});
  });
}

crossdock_status crossdock_layer_backward_dw(const crossdock_layer* layer,
                                             const crossdock_layer_backward_args* args,
                                             const crossdock_layer_saved* saved) {
  return guarded([&] {
    const MoeLayer& called = handle("layer", layer).layer;
    const auto given = capi::read_struct("crossdock_layer_backward_args", args);
    called.backward_dw({.x = capi::to_view("x", given.x),
                        .grad_out = capi::to_view("grad_out", given.grad_out),
                        .saved = &handle("saved", saved).saved,
                        .experts = capi::to_gradients("grads.experts", given.grads.experts),
                        .shared = capi::to_gradients("grads.shared", given.grads.shared),
                        .accumulate = given.accumulate != 0});
  });
}

crossdock_status crossdock_layer_saved_losses(const crossdock_layer_saved* saved, double* losses) {
  return guarded([&] {
    const RouterLosses found = handle("saved", saved).saved.decision.losses.on_host(saved->stream);
    const double values[] = {found.aux, found.z, found.aux_terms.batch, found.aux_terms.sequence,
                             found.aux_terms.global_batch};
    std::copy(std::begin(values), std::end(values), &pointee("losses", losses));
  });
}

crossdock_status crossdock_layer_saved_load(const crossdock_layer_saved* saved, int64_t* load) {
  return guarded([&] {
    const std::vector<int64_t> counts = handle("saved", saved).decision_on_host().load;
    std::copy(counts.begin(), counts.end(), &pointee("load", load));
  });
}

crossdock_status crossdock_layer_saved_dropped(const crossdock_layer_saved* saved,
                                               int64_t* dropped) {
  return guarded([&] {
    const std::vector<int64_t> counts = handle("saved", saved).decision_on_host().dropped;
    std::copy(counts.begin(), counts.end(), &pointee("dropped", dropped));
  });
}

crossdock_status crossdock_layer_saved_report(const crossdock_layer_saved* saved,
                                              crossdock_layer_report* report) {
  return guarded([&] {
    const MoeDecision& decision = handle("saved", saved).saved.decision;
    const Routing routed = decision.router->routing();
    const Segments segments = decision.plan.segments();
    const auto vector = [&](const int64_t* values, int64_t size) {
      return capi::from_view(ConstTensorView(values, {size}, segments.device));
    };
    const ConstTensorView& counts = decision.device_load.device_counts.view;
    const auto* const load =
        counts.given() ? static_cast<const int64_t*>(counts.data) : decision.load.data();
    capi::write_struct("crossdock_layer_report", report,
                       {.struct_size = sizeof(crossdock_layer_report),
                        .expert_ids = capi::from_view(routed.expert_ids),
                        .weights = capi::from_view(routed.weights),
                        .kept_weights = capi::from_view(decision.plan.weights()),
                        .load = vector(load, decision.router->E),
                        .rows_per_expert = vector(segments.counts, segments.num_segments)});
  });
}

void crossdock_layer_saved_destroy(crossdock_layer_saved* saved) {
  capi::destroy(saved);
}

crossdock_status crossdock_update_expert_bias(const crossdock_tensor* bias, const int64_t* load,
                                              double rate, int32_t centred) {
  return guarded([&] {
    const TensorView view = capi::to_view("bias", bias);
    const std::span<const int64_t> loads(&pointee("load", load),
                                         static_cast<size_t>(view.num_rows()));
    update_expert_bias(view, loads, {.rate = rate, .centred = centred != 0});
  });
}
