#include "layer/device_counts.hpp"

#include <bit>
#include <utility>
#include <vector>

#include "comm/agreement/items.hpp"
#include "comm/failure.hpp"
#include "layer/route_counts.hpp"
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

void DeviceCounts::set_device_options(const DeviceOptions& options) {
  options_ = options;
  for (const auto& [key, gather] : gathers_) gather->set_device_options(options_);
}

// Only the first forward compares tokens, because comparing waits for the GPU. That suffices: a
// program that passes equal tokens does so in every step.
void DeviceCounts::agree(Dispatcher& dispatcher, const ForwardCall& call,
                         const std::optional<Error>& refusal) {
  const MoeForwardArgs& args = call.args;
  const bool is_alone = group_.size() == 1 && counts_.other_groups().empty();
  const bool compares = !config_.allow_equal_tokens && !has_compared_ && !is_alone;
  bool is_capture = false;
  std::optional<HostTokens> tokens;
  Sample sample;
  const std::optional<Error> failed = refusal_of([&] {
    if (refusal) throw *refusal;
    is_capture = is_captured(options_.stream, args.x.device);
    if (!compares || is_capture) return;
    tokens.emplace(call.tokens, options_.stream);
    sample = {.tokens = tokens->tokens(), .value = sample_to_compare(tokens->tokens())};
  });
  const Proposal proposal{.operation = "route",
                          .config = call.config_text + counts_.counts_text(group_, args),
                          .refusal = as_refusal(failed)};
  try {
    if (compares) {
      compare_samples(group_, proposal, sample);
    } else {
      dispatcher.agree(proposal, args.x.device);
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
  group_.agree({.operation = "counted", .refusal = as_refusal(refusal)});
}

// Plans for other groups are never kept (see sum_over): ranks there may fail in calls that succeed
// here.
void DeviceCounts::forget_plans() {
  for (const auto& [key, gather] : gathers_) gather->forget_plan();
}

DeviceGather& DeviceCounts::gather_of(Group& group, int64_t num_counts) {
  std::unique_ptr<DeviceGather>& gather = gathers_[{&group, num_counts}];
  if (!gather) {
    const GatheredRows rows{.width = kValuesPerCount * num_counts, .max_rows = group.size()};
    gather = std::make_unique<DeviceGather>(group, rows, memory_);
    gather->set_device_options(options_);
  }
  return *gather;
}

// Counts in memory whose size is a power of two, so that a changing number of sequences needs few
// gathers; the rest is unspecified. Counts of a single sequence need no more.
OwnedTensor DeviceCounts::padded(const OwnedTensor& counts) {
  const int64_t num_counts = counts.view.num_elements();
  if (num_counts == config_.router.num_experts + 1) return counts;
  const auto size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(num_counts)));
  OwnedTensor padded = memory_.take(DType::kI64, {size}, options_.stream);
  memory_.copy(counts.view, padded.view, options_.stream);
  return padded;
}

// Sums counts [n, B * E + B] to [E + 1].
OwnedTensor DeviceCounts::sum(const ConstTensorView& counts, int64_t num_sequences) {
  const int64_t num_sums = counts.shape[1] / num_sequences;
  OwnedTensor sum = memory_.take(DType::kI64, {num_sums}, options_.stream);
  router::sum_batches_on_device({.counts = counts, .num_sequences = num_sequences, .sum = sum.view},
                                options_.stream);
  return sum;
}

// The counts of every sequence, summed over the ranks of a group.
RouterStatistics DeviceCounts::sum_over(Group& group, const RouterStatistics& own) {
  if (group.size() == 1) return own;
  OwnedTensor counts;
  DeviceGather* gather = nullptr;
  run_agreed(group, [&] {
    counts = padded(own.device_counts);
    gather = &gather_of(group, counts.view.num_elements());
  });
  const ConstTensorView row{counts.view.data,
                            DType::kF32,
                            {1, kValuesPerCount * counts.view.num_elements()},
                            counts.view.device};
  const OwnedTensor of_ranks = gather->gather(row);
  if (&group != &group_) gather->forget_plan();
  RouterStatistics total;
  total.num_sequences = own.num_sequences;
  // Treats the counts as those of one sequence with num_counts - 1 experts.
  run_agreed(group, [&] { total.device_counts = sum(as_rows(of_ranks.view, group.size()), 1); });
  total.device_counts.view.shape = own.device_counts.view.shape;
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
    run_agreed(group_, [&] {
      batch.device_counts = sum(as_rows(own.device_counts.view, 1), own.num_sequences);
    });
    sums.load = sum_over(group_, batch);
    sums.batch = counting == &group_ ? sums.load : sum_over(*counting, batch);
    sums.sequences = shared == nullptr ? own : sum_over(*shared, own);
    run_agreed(group_, [&] { set_counts(args, sums, decision); });
  } catch (const Error& error) {
    if (!counts_.other_groups().empty()) group_.fail(error);
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
        adds ? router_.sum(sums.batch, *args.earlier, options_.stream) : sums.batch;
  } else {
    decision.statistics = counts(BalanceScope::kBatch) ? sums.batch : sums.sequences;
  }
  if (counts(BalanceScope::kSequence)) decision.sequence_statistics = sums.sequences;
}

namespace {

DispatchConfig to_all_config(const Group& group, const GatheredRows& rows) {
  const int64_t P = group.size();
  return {.num_experts = P,
          .top_k = P,
          .width = rows.width,
          .max_rows = rows.max_rows,
          .max_routes_per_token = P};
}

}  // namespace

DeviceGather::DeviceGather(Group& group, const GatheredRows& rows, DeviceMemory& memory)
    : group_(group),
      config_(rows),
      memory_(memory),
      to_all_(group, to_all_config(group, rows), "direct") {}

void DeviceGather::set_device_options(const DeviceOptions& options) {
  stream_ = options.stream;
  to_all_.set_device_options(
      {.stream = options.stream, .max_sms = options.max_sms, .run_ahead = options.run_ahead});
}

// A plan made during a capture is filled only by replays of that graph, so calls outside the
// capture make their own. A graph needs every plan that it uses as long as it lives.
Plan DeviceGather::plan_to_all(int64_t num_rows, Device device) {
  const int64_t P = group_.size();
  Plan plan = plan_;
  OwnedTensor map;
  OwnedTensor weights;
  bool captured = false;
  run_agreed(group_, [&] {
    captured = is_captured(stream_, device);
    if (plan.valid()) return;
    map = memory_.take(DType::kBool, {num_rows, P}, stream_);
    weights = memory_.take(DType::kF32, {num_rows, P}, stream_);
    memory_.fill(map.view, 1, stream_);
    memory_.fill(weights.view, 0, stream_);
  });
  if (!plan.valid()) plan = to_all_.plan(DenseRouting{.map = map.view, .weights = weights.view});
  if (captured) {
    captured_plans_.push_back(plan);
  } else {
    plan_ = plan;
  }
  return plan;
}

OwnedTensor DeviceGather::gather(const ConstTensorView& rows) {
  const Plan plan = plan_to_all(rows.num_rows(), rows.device);
  return to_all_.dispatch(plan, {.x = rows}).rows;
}

}  // namespace crossdock
