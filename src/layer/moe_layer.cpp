// A whole layer, forward and backward: decide, dispatch, experts, combine.
#include "crossdock/moe_layer.hpp"

#include <optional>
#include <utility>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "layer/device_counts.hpp"
#include "layer/layer_args.hpp"
#include "layer/layer_parts.hpp"
#include "layer/overlap.hpp"
#include "layer/replicated_tokens.hpp"
#include "layer/route_counts.hpp"

namespace crossdock {

class MoeLayer::Impl {
 public:
  Impl(Group& group, MoeLayerConfig config, MoeLayerOptions options);

  const MoeLayerConfig& config() const { return config_; }
  std::vector<Group*> counting_groups() const { return counts_.other_groups(); }
  void set_device_options(const DeviceOptions& options);
  MoeForwardResult forward(const MoeForwardArgs& args);
  OwnedTensor backward(const MoeBackwardArgs& args);
  void backward_dw(const MoeBackwardDwArgs& args);
  void agree(const Proposal& proposal, Device device);

 private:
  using Refusal = std::optional<Error>;  // of this rank, known before the call

  MoeForwardResult forward_tokens(const MoeForwardArgs& args, int64_t first, Refusal refusal);
  OwnedTensor backward_tokens(const MoeBackwardArgs& args, const Refusal& refusal);
  template <typename Work>
  OwnedTensor gather_slices(const char* operation, const Refusal& refusal, const AllTokens& all,
                            const Work& work);
  MoeDecision decide(const MoeForwardArgs& args, int64_t first, Refusal refusal);
  std::shared_ptr<const RouterOutput> route(const MoeForwardArgs& args);
  void count(const MoeForwardArgs& args, int64_t first, const Refusal& refusal,
             MoeDecision& decision);
  void write_dw(const MoeBackwardDwArgs& args);
  void agree_on_backward(const MoeBackwardArgs& args, Refusal refusal);
  std::string config_text_for(Device device) const;
  Stream stream() const { return parts_ ? parts_->stream : Stream(); }
  void prepare_for(Device device);
  template <typename Work>
  void compute(const char* operation, const Work& work);

  Group& group_;
  MoeLayerConfig config_;
  std::string config_text_;  // must be identical on every rank, see config_text_for
  std::optional<Error> config_error_;
  RouteCounts counts_;
  std::optional<ReplicatedTokens> replicated_;
  std::optional<LayerParts> parts_;            // unused if config_error_ is set
  std::optional<Overlap> overlap_;             // made by the first call, if requested
  std::optional<DeviceCounts> device_counts_;  // made by the first forward on a GPU
};

MoeLayer::Impl::Impl(Group& group, MoeLayerConfig config, MoeLayerOptions options)
    : group_(group),
      config_(std::move(config)),
      counts_(group,
              {.counting = options.counting_group,
               .sequences = options.sequence_group,
               .replicated = options.replicated_over},
              config_) {
  if (options.replicated_over != nullptr) replicated_.emplace(*options.replicated_over);
  // An exception here would leave the other ranks waiting; instead, the first call refuses on all.
  config_error_ = refusal_of([&] {
    config_ = fill_in(config_, group_);
    config_text_ = config_text(config_);
    parts_.emplace(group_, config_, options);
    config_.strategy = parts_->dispatcher.strategy().name();
  });
}

MoeForwardResult MoeLayer::Impl::forward(const MoeForwardArgs& args) {
  if (!replicated_) return forward_tokens(args, 0, std::nullopt);
  MoeForwardArgs slice = args;
  Refusal refusal = refusal_of([&] {
    if (config_error_) throw *config_error_;
    check_outputs(*parts_, args);
    check_replicated(config_.router, args);
    slice = replicated_->slice(args);
  });
  refusal = replicated_->agree("replicate", args.x, std::move(refusal), stream());
  MoeForwardResult result;
  result.out = gather_slices("gather_out", refusal, {args.x.num_rows(), args.out}, [&] {
    result = forward_tokens(slice, replicated_->first_of(args.x.num_rows()), refusal);
    return result.out;
  });
  return result;
}

OwnedTensor MoeLayer::Impl::backward(const MoeBackwardArgs& args) {
  if (!replicated_) return backward_tokens(args, std::nullopt);
  MoeBackwardArgs slice = args;
  Refusal refusal = refusal_of([&] {
    if (config_error_) throw *config_error_;
    check_outputs(*parts_, args);
    slice = replicated_->slice(args);
  });
  refusal = replicated_->agree("replicate_grad", args.grad_out, std::move(refusal), stream());
  return gather_slices("gather_grad_x", refusal, {args.x.num_rows(), args.grad_x},
                       [&] { return backward_tokens(slice, refusal); });
}

// Runs a call on this rank's slice of the tokens and gathers the result on all ranks that hold
// them. These ranks may be in different layers' groups: a rank that fails tells both groups.
template <typename Work>
OwnedTensor MoeLayer::Impl::gather_slices(const char* operation, const Refusal& refusal,
                                          const AllTokens& all, const Work& work) {
  OwnedTensor slice;
  try {
    slice = work();
  } catch (const Error& error) {
    if (!refusal) replicated_->refuse(operation, group_, error);  // otherwise all know already
    throw;
  }
  OwnedTensor result;
  const Refusal failed =
      refusal_of([&] { result = replicated_->gather(operation, slice.view, all, *parts_); });
  group_.agree({.operation = "gathered", .refusal = as_refusal(failed)});
  return result;
}

MoeForwardResult MoeLayer::Impl::forward_tokens(const MoeForwardArgs& args, int64_t first,
                                                Refusal refusal) {
  MoeForwardResult result;
  MoeSaved& saved = result.saved;
  saved.decision = decide(args, first, std::move(refusal));
  const Plan& plan = saved.decision.plan;

  ForwardRows rows;
  if (overlap_ && args.x.device.is_cpu()) {
    rows = overlap_->forward(args, saved);
  } else if (parts_->dispatches_aside(args.x.device)) {
    rows = forward_beside_dispatch(*parts_, args, saved);
  } else {
    saved.sent = parts_->dispatcher.dispatch(
        plan, {.x = args.x, .with_row_weights = parts_->weights_in_experts()});
    run_agreed(group_, [&] {
      rows.shared_y = parts_->forward_shared(args, saved);
      rows.y = parts_->forward_experts(args, saved);
    });
  }

  result.out = parts_->combine(plan, rows.y.view, args.out);
  if (parts_->shared) {
    compute("add_shared",
            [&] { parts_->shared->add(rows.shared_y.view, result.out.view, parts_->stream); });
  }
  return result;
}

// The router chooses experts for this rank's tokens; the ranks agree, count routes and make a plan.
// `first` is the index of the first token if these are a slice of replicated tokens.
MoeDecision MoeLayer::Impl::decide(const MoeForwardArgs& args, int64_t first, Refusal refusal) {
  MoeDecision decision;
  const auto prepare = [&] {
    if (config_error_) throw *config_error_;
    check_args(*parts_, args);
    if (!args.x.device.is_cpu()) counts_.check_on_gpu(args);
    prepare_for(args.x.device);
    if (args.decision != nullptr) {
      decision = *args.decision;
    } else {
      decision.router = route(args);
    }
  };
  if (!refusal) refusal = refusal_of(prepare);
  if (args.decision != nullptr) {
    agree({.operation = "route",
           .subject = id_of(args.decision->plan),
           .config = config_text_for(args.x.device) + ";decision=1",
           .refusal = as_refusal(refusal)},
          args.x.device);
    return decision;
  }
  count(args, first, refusal, decision);
  run_agreed(group_, [&] {
    decision.losses =
        parts_->router.losses(*decision.router, decision.loss_counts(), parts_->stream);
  });
  decision.plan = parts_->plan(*decision.router);
  if (decision.plan.device().is_cpu()) {
    run_agreed(group_, [&] {
      decision.dropped = drops_of_experts(decision.plan, config_.router.num_experts);
    });
  }
  return decision;
}

// Agrees on the forward with the other ranks and sets the counts of the decision.
void MoeLayer::Impl::count(const MoeForwardArgs& args, int64_t first, const Refusal& refusal,
                           MoeDecision& decision) {
  const ForwardCall call{.args = args,
                         .tokens = {.x = args.x, .mask = args.mask, .first = first},
                         .config_text = config_text_for(args.x.device) + ";decision=0"};
  if (args.x.device.is_cpu() || !device_counts_) return counts_.agree(call, refusal, decision);
  device_counts_->agree(call, refusal);
  device_counts_->count(args, decision);
}

std::shared_ptr<const RouterOutput> MoeLayer::Impl::route(const MoeForwardArgs& args) {
  const EventRecorder::Scope scope(group_.recorder(), "router", 0);
  return std::make_shared<const RouterOutput>(
      parts_->router.route({.x = args.x,
                            .gate = args.weights.gate,
                            .expert_bias = args.weights.expert_bias,
                            .mask = args.mask,
                            .sequence_ids = args.sequence_ids,
                            .num_sequences = args.num_sequences,
                            .forced_ids = args.forced_ids,
                            .jitter_seed = args.jitter_seed,
                            .token_ids = args.token_ids,
                            .stream = parts_->stream}));
}

OwnedTensor MoeLayer::Impl::backward_tokens(const MoeBackwardArgs& args, const Refusal& refusal) {
  agree_on_backward(args, refusal);
  MoeSaved& saved = *args.saved;
  const MoeDecision& decision = saved.decision;
  const Plan& plan = decision.plan;

  // Backward of the combine: grad_out goes to the rows, where the experts apply the weights.
  BackwardRows rows;
  if (overlap_ && args.x.device.is_cpu()) {
    rows = overlap_->backward(args);
  } else if (parts_->dispatches_aside(args.x.device)) {
    rows = backward_beside_dispatch(*parts_, args);
  } else {
    saved.grad_y =
        parts_->dispatcher.dispatch(plan, {.x = args.grad_out, .with_row_weights = true});
    run_agreed(group_, [&] {
      rows.shared_grad_x = parts_->backward_shared(args);
      parts_->backward_experts(args, rows);
    });
  }

  // Backward of the dispatch. The gradients of the weights return to the router.
  OwnedTensor grad_x = parts_->dispatch_backward(plan, rows.grad_rows.view, args.grad_x);
  const OwnedTensor grad_weights = parts_->collect_weights(plan, rows.grad_row_weights.view);
  compute("router_backward", [&] {
    parts_->router.backward({.x = args.x,
                             .gate = args.weights.gate,
                             .output = decision.router.get(),
                             .grad_weights = grad_weights.view,
                             .counts = decision.loss_counts(),
                             .grad_losses = args.grad_losses,
                             .grad_x = grad_x.view,
                             .accumulate_x = true,
                             .grad_gate = args.grads.gate,
                             .grad_bias = args.grads.gate_bias,
                             .accumulate_gate = args.accumulate,
                             .grad_logits = {},
                             .stream = parts_->stream});
    if (parts_->shared) {
      parts_->shared->add(rows.shared_grad_x.view, grad_x.view, parts_->stream);
    }
  });
  if (args.delay_dw) return grad_x;

  run_agreed(group_, [&] {
    write_dw({.x = args.x,
              .grad_out = args.grad_out,
              .saved = &saved,
              .experts = args.grads.experts,
              .shared = args.grads.shared,
              .accumulate = args.accumulate});
  });
  saved = {.decision = std::move(saved.decision)};
  return grad_x;
}

void MoeLayer::Impl::backward_dw(const MoeBackwardDwArgs& args) {
  if (config_error_) throw *config_error_;
  write_dw(replicated_ ? replicated_->slice(args) : args);
}

void MoeLayer::Impl::write_dw(const MoeBackwardDwArgs& args) {
  check_args(*parts_, args);
  parts_->backward_dw(args);
}

void MoeLayer::Impl::agree_on_backward(const MoeBackwardArgs& args, Refusal refusal) {
  const auto prepare = [&] {
    if (config_error_) throw *config_error_;
    check_args(*parts_, args);
    prepare_for(args.x.device);
  };
  if (!refusal) refusal = refusal_of(prepare);
  agree({.operation = "layer_backward",
         .subject = args.saved != nullptr ? id_of(args.saved->decision.plan) : 0,
         .config = config_text_for(args.x.device),
         .refusal = as_refusal(refusal)},
        args.x.device);
}

void MoeLayer::Impl::agree(const Proposal& proposal, Device device) {
  if (config_error_) {
    group_.agree(proposal);  // throws: config_error_ is this rank's refusal
  } else {
    parts_->dispatcher.agree(proposal, device);
  }
}

// On GPUs, a dispatch concurrent with the shared experts has its own signals: it waits for
// dispatches of the same kind on the other ranks.
std::string MoeLayer::Impl::config_text_for(Device device) const {
  if (device.is_cpu()) return config_text_ + ";device=cpu";
  return concat(config_text_, ";device=gpu;overlap_shared=", config_.overlap_shared,
                ";other_groups=", parts_ && parts_->meets_elsewhere());
}

// Called before the ranks agree: a rank that cannot start a thread or use the GPU refuses the call.
void MoeLayer::Impl::prepare_for(Device device) {
  if (device.is_cpu()) {
    if (!overlap_ && Overlap::is_requested(config_)) overlap_.emplace(*parts_);
    return;
  }
  parts_->prepare_experts(device);
  if (!device_counts_) device_counts_.emplace(*parts_, counts_, parts_->memory_of(device));
}

void MoeLayer::Impl::set_device_options(const DeviceOptions& options) {
  if (config_error_) return;  // the first call reports it
  parts_->set_device_options(options);
  if (device_counts_) device_counts_->update_device_options();
}

// Runs and records local work. A failure is reported to the other ranks, which wait in the next
// call.
template <typename Work>
void MoeLayer::Impl::compute(const char* operation, const Work& work) {
  run_agreed(group_, [&] {
    const EventRecorder::Scope scope(group_.recorder(), operation, 0);
    work();
  });
}

MoeLayer::MoeLayer(Group& group, MoeLayerConfig config, MoeLayerOptions options)
    : impl_(std::make_unique<Impl>(group, std::move(config), std::move(options))) {}

MoeLayer::~MoeLayer() = default;

const MoeLayerConfig& MoeLayer::config() const {
  return impl_->config();
}

std::vector<Group*> MoeLayer::counting_groups() const {
  return impl_->counting_groups();
}

void MoeLayer::set_device_options(const DeviceOptions& options) {
  impl_->set_device_options(options);
}

void MoeLayer::agree(const Proposal& proposal, Device device) {
  impl_->agree(proposal, device);
}

MoeForwardResult MoeLayer::forward(const MoeForwardArgs& args) {
  MoeForwardResult result = impl_->forward(flat(args));
  result.out.view = shaped_like(args.x, result.out.view);
  return result;
}

OwnedTensor MoeLayer::backward(const MoeBackwardArgs& args) {
  OwnedTensor grad_x = impl_->backward(flat(args));
  grad_x.view = shaped_like(args.x, grad_x.view);
  return grad_x;
}

void MoeLayer::backward_dw(const MoeBackwardDwArgs& args) const {
  impl_->backward_dw(flat(args));
}

}  // namespace crossdock
