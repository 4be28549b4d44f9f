#include "layer/device_counts.hpp"

#include <vector>

#include "comm/agreement/items.hpp"
#include "comm/failure.hpp"
#include "layer/route_counts.hpp"
#include "router/backend.hpp"

namespace crossdock {

void DeviceCounts::update_device_options() {
  for (auto& [group, dispatcher] : in_other_groups_) {
    dispatcher.set_device_options(
        {.stream = parts_.stream, .run_ahead = parts_.device_options.run_ahead});
  }
}

// Only the first forward compares tokens, because comparing waits for the GPU. That suffices: a
// program that passes equal tokens does so in every step.
void DeviceCounts::agree(const ForwardCall& call, const std::optional<Error>& refusal) {
  const MoeForwardArgs& args = call.args;
  const bool is_alone = parts_.group.size() == 1 && counts_.other_groups().empty();
  const bool compares = !parts_.config.allow_equal_tokens && !has_compared_ && !is_alone;
  bool is_capture = false;
  std::optional<HostTokens> tokens;
  Sample sample;
  const std::optional<Error> failed = refusal_of([&] {
    if (refusal) throw *refusal;
    is_capture = is_captured(parts_.stream, args.x.device);
    if (!compares || is_capture) return;
    tokens.emplace(call.tokens, parts_.stream);
    sample = {.tokens = tokens->tokens(), .value = sample_to_compare(tokens->tokens())};
  });
  const Proposal proposal{.operation = "route",
                          .config = call.config_text + counts_.counts_text(parts_.group, args),
                          .refusal = as_refusal(failed)};
  try {
    if (compares) {
      compare_samples(parts_.group, proposal, sample);
    } else {
      parts_.dispatcher.agree(proposal, args.x.device);
    }
  } catch (const Error& error) {
    counts_.refuse_in_other_groups(args, error);
    throw;
  }
  compare_in_other_groups(args, sample);
  has_compared_ = has_compared_ || (compares && !is_capture);
}

// The ranks of a group agree, and compare their samples.
void DeviceCounts::compare_samples(Group& group, Proposal proposal, const Sample& sample) const {
  proposal.body = body_of(sample.value);
  const std::vector<uint64_t> samples = items_of<uint64_t>(group.agree(proposal));
  refuse_equal_tokens(group, samples, sample.tokens);
}

// The ranks of the layer's group may be in different other groups: a rank that is refused in one
// tells all of them.
void DeviceCounts::compare_in_other_groups(const MoeForwardArgs& args, const Sample& sample) const {
  if (counts_.other_groups().empty()) return;
  std::optional<Error> refusal;
  for (Group* other : counts_.other_groups()) {
    const std::optional<Error> failed = refusal_of([&] {
      compare_samples(*other,
                      {.operation = "count",
                       .config = counts_.counts_text(*other, args),
                       .refusal = as_refusal(refusal)},
                      sample);
    });
    if (!refusal) refusal = failed;
  }
  parts_.group.agree({.operation = "counted", .refusal = as_refusal(refusal)});
}

// A dispatcher in another group makes no plans.
Dispatcher& DeviceCounts::dispatcher_in(Group& group) {
  if (&group == &parts_.group) return parts_.dispatcher;
  const int64_t P = group.size();
  const DispatchConfig config{.num_experts = P, .top_k = 1, .width = 1, .max_rows = P};
  const auto [found, is_new] = in_other_groups_.try_emplace(&group, group, config, "direct");
  if (is_new) update_device_options();
  return found->second;
}

// The counts of all sequences of this rank together.
RouterStatistics DeviceCounts::sum_sequences(const RouterStatistics& own) {
  if (own.num_sequences == 1) return own;
  const ConstTensorView& counts = own.device_counts.view;
  const int64_t num_counts = counts.num_elements();
  RouterStatistics batch;
  batch.device_counts = memory_.take(DType::kI64, {num_counts / own.num_sequences}, parts_.stream);
  router::sum_batches_on_device(
      {.counts = {counts.data, DType::kI64, {1, num_counts}, counts.device},
       .num_sequences = own.num_sequences,
       .sum = batch.device_counts.view},
      parts_.stream);
  return batch;
}

// The counts of every sequence, summed over the ranks of a group.
RouterStatistics DeviceCounts::sum_over(Group& group, const RouterStatistics& own) {
  if (group.size() == 1) return own;
  Dispatcher* dispatcher = nullptr;
  run_agreed(group, [&] { dispatcher = &dispatcher_in(group); });
  RouterStatistics total;
  total.num_sequences = own.num_sequences;
  total.device_counts = dispatcher->all_reduce(own.device_counts.view);
  return total;
}

// If one group fails, ranks of the other groups may still be waiting for our counts, so fail all of
// them.
void DeviceCounts::count(const MoeForwardArgs& args, MoeDecision& decision) {
  const RouterStatistics& own = decision.router->statistics;
  Group* counting = counts_.batch_group();
  Group* shared = counts_.sequence_group();
  RouterStatistics batch;
  Sums sums;
  try {
    run_agreed(parts_.group, [&] { batch = sum_sequences(own); });
    sums.load = sum_over(parts_.group, batch);
    sums.batch = counting == &parts_.group ? sums.load : sum_over(*counting, batch);
    sums.sequences = shared == nullptr ? own : sum_over(*shared, own);
    run_agreed(parts_.group, [&] { set_counts(args, sums, decision); });
  } catch (const Error& error) {
    if (!counts_.other_groups().empty()) parts_.group.fail(error);
    for (Group* other : counts_.other_groups()) other->fail(error);
    throw;
  }
}

// The host does not know the number of tokens: the losses take it from batch_statistics.
void DeviceCounts::set_counts(const MoeForwardArgs& args, const Sums& sums,
                              MoeDecision& decision) const {
  decision.device_load = sums.load;
  decision.batch_statistics = sums.batch;
  decision.total_sequences = static_cast<double>(args.total_sequences);
  if (counts(BalanceScope::kGlobalBatch)) {
    const bool adds = args.earlier != nullptr;
    decision.statistics =
        adds ? parts_.router.sum(sums.batch, *args.earlier, parts_.stream) : sums.batch;
  } else {
    decision.statistics = counts(BalanceScope::kBatch) ? sums.batch : sums.sequences;
  }
  if (counts(BalanceScope::kSequence)) decision.sequence_statistics = sums.sequences;
}

}  // namespace crossdock
