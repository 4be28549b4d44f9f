#include "layer/device_counts.hpp"

#include <utility>
#include <vector>

#include "comm/agreed_failure.hpp"
#include "comm/agreed_items.hpp"
#include "layer/host_tokens.hpp"
#include "router/backend.hpp"

namespace crossdock {
namespace {

// Counts are int64 and travel as fp32 rows: the dispatcher does not change their bits.
constexpr int64_t kValuesPerCount = 2;

// The same counts as a matrix.
ConstTensorView as_rows(const TensorView& counts, int64_t num_rows) {
  return {counts.data,
          DType::kI64,
          {num_rows, counts.num_bytes() / (num_rows * size_of(DType::kI64))},
          counts.device};
}

}  // namespace

DeviceCounts::DeviceCounts(Group& group, const MoeLayerConfig& config, const RouteCounts& counts,
                           const Router& router, DeviceMemory& memory)
    : group_(group), config_(config), counts_(counts), router_(router), memory_(memory) {}

void DeviceCounts::set_device_options(const DeviceOptions& options, Stream stream) {
  options_ = options;
  stream_ = stream;
  for (const auto& [key, gather] : gathers_) gather->set_device_options(options_, stream_);
}

// Only the first forward compares tokens, because comparing waits for the GPU. That suffices: a
// program that passes equal tokens does so in every step.
void DeviceCounts::agree(Dispatcher& dispatcher, const ForwardCall& call,
                         const std::optional<Error>& refusal) {
  const MoeForwardArgs& args = call.args;
  const bool is_alone = group_.size() == 1 && counts_.other_groups().empty();
  const bool compares = !config_.allow_equal_tokens && !has_compared_ && !is_alone;
  std::optional<HostTokens> tokens;
  Sample sample;
  const std::optional<Error> failed = refusal_of([&] {
    if (refusal) throw *refusal;
    if (!compares || is_captured(stream_, args.x.device)) return;
    tokens.emplace(call.tokens, stream_);
    sample = {.tokens = tokens->tokens(), .value = sample_to_compare(tokens->tokens())};
  });
  const Proposal proposal{.operation = "route",
                          .config = call.config_text + counts_.counts_text(group_, args),
                          .refusal = as_refusal(failed)};
  if (!compares && !counts_.meets_elsewhere()) return dispatcher.agree(proposal, args.x.device);
  try {
    meet(group_, proposal, sample);
  } catch (const Error& error) {
    counts_.refuse_in_other_groups(args, error);
    throw;
  }
  meet_in_other_groups(args, sample);
  has_compared_ = true;
}

// The ranks of a group agree, and compare their samples.
void DeviceCounts::meet(Group& group, Proposal proposal, const Sample& sample) const {
  proposal.body = body_of(sample.value);
  const std::vector<uint64_t> samples = items_of<uint64_t>(group.agree(proposal));
  refuse_equal_tokens(group, samples, sample.tokens);
}

// The ranks of the layer's group may be in different other groups: a rank that is refused in one
// tells all of them.
void DeviceCounts::meet_in_other_groups(const MoeForwardArgs& args, const Sample& sample) const {
  if (counts_.other_groups().empty()) return;
  std::optional<Error> refusal;
  for (Group* other : counts_.other_groups()) {
    const std::optional<Error> failed = refusal_of([&] {
      meet(*other,
           {.operation = "count",
            .config = counts_.counts_text(*other, args),
            .refusal = as_refusal(refusal)},
           sample);
    });
    if (!refusal) refusal = failed;
  }
  group_.agree({.operation = "counted", .refusal = as_refusal(refusal)});
}

// Those of other groups are not kept: their ranks may fail in calls in which this one does not.
void DeviceCounts::forget_plans() {
  for (const auto& [key, gather] : gathers_) gather->forget_plan();
}

DeviceGather& DeviceCounts::gather_of(Group& group, int64_t num_counts) {
  std::unique_ptr<DeviceGather>& gather = gathers_[{&group, num_counts}];
  if (!gather) {
    const GatheredRows rows{.width = kValuesPerCount * num_counts, .max_rows = group.size()};
    gather = std::make_unique<DeviceGather>(group, rows, memory_);
    gather->set_device_options(options_, stream_);
  }
  return *gather;
}

// Sums counts [n, B * E + B] to [E + 1].
OwnedTensor DeviceCounts::sum(const ConstTensorView& counts, int64_t num_sequences) {
  const int64_t num_sums = counts.shape[1] / num_sequences;
  OwnedTensor sum = memory_.take(DType::kI64, {num_sums}, stream_);
  router::sum_batches_on_device({.counts = counts, .num_sequences = num_sequences, .sum = sum.view},
                                stream_);
  return sum;
}

// The counts of every sequence, summed over the ranks of a group.
RouterStatistics DeviceCounts::sum_over(Group& group, const RouterStatistics& own) {
  if (group.size() == 1) return own;
  const TensorView counts = own.device_counts.view;
  const int64_t num_counts = counts.num_elements();
  DeviceGather* gather = nullptr;
  run_agreed(group, [&] { gather = &gather_of(group, num_counts); });
  const ConstTensorView row{
      counts.data, DType::kF32, {1, kValuesPerCount * num_counts}, counts.device};
  const OwnedTensor of_ranks = gather->gather(row);
  if (&group != &group_) gather->forget_plan();
  RouterStatistics total;
  total.num_sequences = own.num_sequences;
  // As if each count were one of an expert of a single sequence.
  run_agreed(group, [&] { total.device_counts = sum(as_rows(of_ranks.view, group.size()), 1); });
  return total;
}

// Ranks that wait for this rank's counts may be in other groups than the one that fails here.
void DeviceCounts::count(const MoeForwardArgs& args, MoeDecision& decision) {
  const RouterStatistics& own = decision.router->statistics;
  Group* counting = counts_.batch_group();
  Group* shared = counts_.sequence_group();
  RouterStatistics batch;
  Sums sums;
  try {
    run_agreed(group_, [&] {
      batch.device_counts = sum(as_rows(own.device_counts.view, 1), own.num_sequences);
    });
    sums.load = sum_over(group_, batch);
    sums.batch = counting == &group_ ? sums.load : sum_over(*counting, batch);
    sums.sequences = shared == nullptr ? own : sum_over(*shared, own);
  } catch (const Error& error) {
    if (!counts_.other_groups().empty()) group_.fail(error);
    for (Group* other : counts_.other_groups()) other->fail(error);
    throw;
  }
  run_agreed(group_, [&] { set_counts(args, sums, decision); });
}

// The host does not know the number of tokens: the losses take it from batch_statistics.
void DeviceCounts::set_counts(const MoeForwardArgs& args, const Sums& sums,
                              MoeDecision& decision) const {
  decision.device_load = sums.load;
  decision.batch_statistics = sums.batch;
  decision.total_sequences = static_cast<double>(args.total_sequences);
  if (counts(BalanceScope::kGlobalBatch)) {
    const bool adds = args.earlier != nullptr;
    decision.statistics = adds ? router_.sum(sums.batch, *args.earlier, stream_) : sums.batch;
  } else {
    decision.statistics = counts(BalanceScope::kBatch) ? sums.batch : sums.sequences;
  }
  if (counts(BalanceScope::kSequence)) decision.sequence_statistics = sums.sequences;
}

}  // namespace crossdock
