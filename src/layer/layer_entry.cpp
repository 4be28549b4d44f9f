// How the ranks enter forward and backward: every rank checks what it was given, the router
// decides, and then all go on or all refuse.
#include <algorithm>
#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/moe_layer.hpp"
#include "experts/shared_experts.hpp"
#include "layer/aliasing.hpp"
#include "layer/route_counts.hpp"
#include "layer/worker.hpp"

namespace crossdock {

void MoeLayer::check(const MoeForwardArgs& args) const {
  if (flaw_) throw *flaw_;
  const Shape tokens{args.x.num_rows(), config_.router.width};
  check_tensor("x", args.x, config_.experts.dtype, tokens);
  if (args.out.given()) check_tensor("out", args.out, config_.experts.dtype, tokens);
  experts_->check(args.weights.experts);
  if (shared_) shared_->experts().check(args.weights.shared);
  check_outputs(args);
  if (args.decision == nullptr) return check_earlier(config_.router, args.earlier);
  CROSSDOCK_CHECK(args.decision->router != nullptr && args.decision->plan.valid(),
                  "decision must be that of an earlier forward, got an empty one");
  CROSSDOCK_CHECK(args.decision->plan.num_tokens() == tokens[0], "decision is about ",
                  args.decision->plan.num_tokens(), " tokens, x has ", tokens[0],
                  "; give the tokens of the forward it comes from");
}

void MoeLayer::check(const MoeBackwardArgs& args) const {
  if (flaw_) throw *flaw_;
  CROSSDOCK_CHECK(args.saved != nullptr && args.saved->sent.rows.view.given() &&
                      !args.saved->grad_y.rows.view.given(),
                  "saved must be that of a forward which had no backward yet");
  const DType dtype = config_.experts.dtype;
  const DType sums = args.saved->decision.router->weight_dtype;
  const int64_t E = config_.router.num_experts;
  const Shape tokens{args.saved->decision.plan.num_tokens(), config_.router.width};
  check_tensor("x", args.x, dtype, tokens);
  check_tensor("grad_out", args.grad_out, dtype, tokens);
  if (args.grad_x.given()) check_tensor("grad_x", args.grad_x, dtype, tokens);
  if (args.grads.gate.given()) {
    check_tensor("grad of gate", args.grads.gate, sums, {E, config_.router.width});
  }
  if (args.grads.gate_bias.given()) {
    check_tensor("grad of gate_bias", args.grads.gate_bias, sums, {E});
  }
  experts_->check(args.weights.experts);
  experts_->check(args.grads.experts);
  check_outputs(args);
  if (!shared_) return;
  shared_->experts().check(args.weights.shared);
  shared_->experts().check(args.grads.shared);
}

MoeDecision MoeLayer::decide(const MoeForwardArgs& args) {
  MoeDecision decision;
  std::vector<int64_t> packed;
  const std::optional<Error> refusal = refusal_of([&] {
    check(args);
    start_worker();
    if (args.decision != nullptr) {
      decision = *args.decision;
      return;
    }
    const EventRecorder::Scope scope(group_.recorder(), "router", 0);
    decision.router = std::make_shared<const RouterOutput>(
        router_->route({.x = args.x,
                        .gate = args.weights.gate,
                        .expert_bias = args.weights.expert_bias,
                        .mask = args.mask,
                        .sequence_ids = args.sequence_ids,
                        .num_sequences = args.num_sequences,
                        .forced_ids = args.forced_ids,
                        .jitter_seed = args.jitter_seed,
                        .token_ids = args.token_ids}));
    packed = pack(decision.router->statistics);
  });
  const bool is_new = args.decision == nullptr;
  const bool counts_here = is_new && !counts_apart();
  Agreement agreement;
  try {
    agreement = group_.agree(
        {.operation = "route",
         .subject = !is_new && args.decision->plan.valid() ? args.decision->plan.id() : 0,
         .config =
             concat(config_text_, ";decision=", !is_new, counts_here ? counts_text(args) : ""),
         .body = std::as_bytes(std::span(packed)),
         .rejection = refusal ? &*refusal : nullptr});
  } catch (const Error& error) {
    if (is_new && counts_apart()) pass_on_to_counting_group(args, error);
    throw;
  }
  if (!is_new) return decision;
  add_up_losses(args, agreement, decision);
  decision.plan = dispatcher_->plan(decision.router->routing());
  return decision;
}

bool MoeLayer::counts_apart() const {
  return counting_group_ != nullptr && counting_group_ != &group_;
}

// With BalanceScope::kSequence and no stated group, every rank counts its own sequences.
bool MoeLayer::counts_alone() const {
  return counting_group_ == nullptr && config_.router.aux_loss_scope == BalanceScope::kSequence;
}

// What must be identical on the ranks that count together.
std::string MoeLayer::counts_text(const MoeForwardArgs& args) const {
  const bool by_sequence = config_.router.aux_loss_scope == BalanceScope::kSequence;
  std::string text;
  if (by_sequence && !counts_alone()) text += concat(";num_sequences=", args.num_sequences);
  if (by_sequence) text += concat(";total_sequences=", args.total_sequences);
  const int64_t earlier = args.earlier != nullptr ? num_tokens(*args.earlier) : 0;
  return text + concat(";earlier_tokens=", earlier);
}

// Ranks of other groups may count with this one and wait for it: a refusal of this group is theirs.
// After a mismatch or a failure not all ranks of this group would come.
void MoeLayer::pass_on_to_counting_group(const MoeForwardArgs& args, const Error& refusal) {
  if (refusal.code() == ErrorCode::kMismatch || group_.is_poisoned()) return;
  refusal_of([&] {
    counting_group_->agree(
        {.operation = "count", .config = counts_text(args), .body = {}, .rejection = &refusal});
  });
}

// The counts of the counting group. Others of this group may be counted elsewhere, so all ranks of
// this group learn of a failure.
RouterStatistics MoeLayer::count_apart(const MoeForwardArgs& args, const RouterStatistics& own) {
  RouterStatistics counted;
  const std::optional<Error> refusal = refusal_of([&] {
    const std::vector<int64_t> packed = pack(own);
    const Agreement agreement = counting_group_->agree({.operation = "count",
                                                        .config = counts_text(args),
                                                        .body = std::as_bytes(std::span(packed))});
    counted = sum(unpack_all(agreement, counting_group_->size()));
  });
  group_.agree({.operation = "counted",
                .config = {},
                .body = {},
                .rejection = refusal ? &*refusal : nullptr});
  return counted;
}

// Loads and losses of the group, from the statistics that came with the agreement.
void MoeLayer::add_up_losses(const MoeForwardArgs& args, const Agreement& agreement,
                             MoeDecision& decision) {
  const RouterStatistics& own = decision.router->statistics;
  const std::vector<RouterStatistics> ranks = unpack_all(agreement, group_.size());
  decision.load.assign(static_cast<size_t>(config_.router.num_experts), 0);
  for (const RouterStatistics& rank : ranks) {
    const std::vector<int64_t> load = rank.load();
    for (size_t e = 0; e < load.size(); ++e) decision.load[e] += load[e];
  }
  decision.statistics = counts_apart() ? count_apart(args, own) : counts_alone() ? own : sum(ranks);
  const std::vector<RouterStatistics> counted =
      counts_alone() ? ranks : std::vector<RouterStatistics>{decision.statistics};
  for (const RouterStatistics& statistics : counted) {
    decision.total_tokens += num_tokens(statistics);
    decision.total_sequences += num_sequences_with_tokens(statistics);
  }
  if (args.total_sequences > 0) decision.total_sequences = args.total_sequences;
  if (args.earlier != nullptr) decision.statistics.add(*args.earlier);
  run_agreed(group_,
             [&] { decision.losses = router_->losses(*decision.router, decision.loss_counts()); });
}

void MoeLayer::agree_on_backward(const MoeBackwardArgs& args) {
  const std::optional<Error> refusal = refusal_of([&] {
    check(args);
    start_worker();
  });
  const bool has_plan = args.saved != nullptr && args.saved->decision.plan.valid();
  group_.agree({.operation = "layer_backward",
                .subject = has_plan ? args.saved->decision.plan.id() : 0,
                .config = config_text_,
                .body = {},
                .rejection = refusal ? &*refusal : nullptr});
}

}  // namespace crossdock
