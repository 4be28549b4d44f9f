#include "layer/device_counts.hpp"

#include <cstddef>
#include <utility>
#include <vector>

#include "comm/agreed_failure.hpp"
#include "comm/agreed_items.hpp"
#include "core/check.hpp"
#include "layer/token_identity.hpp"
#include "router/backend.hpp"

namespace crossdock {
namespace {

// Counts are int64 and travel as fp32 rows: the dispatcher does not change their bits.
constexpr int64_t kValuesPerCount = 2;

DispatchConfig to_all_config(const Group& group, const MoeLayerConfig& config) {
  const int64_t P = group.size();
  return {.num_experts = P,
          .top_k = P,
          .width = kValuesPerCount * (config.router.num_experts + 1),
          .max_rows = P,
          .max_routes_per_token = P};
}

// Copies of GPU tokens in host memory.
class HostTokens {
 public:
  HostTokens(const MoeForwardArgs& args, Stream stream)
      : x_(read(args.x, stream)), mask_(read(args.mask, stream)) {
    tokens_.x = {x_.data(), args.x.dtype, args.x.shape};
    if (args.mask.given()) tokens_.mask = {mask_.data(), args.mask.dtype, args.mask.shape};
  }

  const LocalTokens& tokens() const { return tokens_; }

 private:
  static std::vector<std::byte> read(const ConstTensorView& tensor, Stream stream) {
    std::vector<std::byte> bytes(tensor.given() ? static_cast<size_t>(tensor.num_bytes()) : 0);
    if (!bytes.empty()) router::read_device(tensor, bytes, stream);
    return bytes;
  }

  std::vector<std::byte> x_;
  std::vector<std::byte> mask_;
  LocalTokens tokens_;
};

}  // namespace

DeviceCounts::DeviceCounts(Group& group, const MoeLayerConfig& config, const Router& router,
                           DeviceMemory& memory)
    : group_(group),
      config_(config),
      router_(router),
      memory_(memory),
      to_all_(group, to_all_config(group, config), "direct") {}

void DeviceCounts::set_device_options(const DeviceOptions& options, Stream stream) {
  stream_ = stream;
  to_all_.set_device_options({.stream = options.stream, .max_sms = options.max_sms});
}

// Only the first forward compares tokens, because comparing waits for the GPU. That suffices: a
// program that passes equal tokens does so in every step.
void DeviceCounts::agree(Dispatcher& dispatcher, const MoeForwardArgs& args,
                         const std::string& config_text, const std::optional<Error>& refusal) {
  std::optional<HostTokens> tokens;
  uint64_t sample = 0;
  const bool compares = !config_.allow_equal_tokens && group_.size() > 1 && !has_compared_;
  const std::optional<Error> failed = refusal_of([&] {
    if (refusal) throw *refusal;
    if (!compares || is_captured(stream_, args.x.device)) return;
    tokens.emplace(args, stream_);
    sample = sample_to_compare(tokens->tokens());
  });
  // The counts of earlier forwards are on the GPU and are not compared.
  std::string text = concat(config_text, ";earlier=", args.earlier != nullptr);
  if (counts(BalanceScope::kSequence)) text += concat(";total_sequences=", args.total_sequences);
  Proposal proposal{.operation = "route", .config = std::move(text), .refusal = as_refusal(failed)};
  if (!compares) return dispatcher.agree(proposal, args.x.device);
  proposal.body = body_of(sample);
  const std::vector<uint64_t> samples = items_of<uint64_t>(group_.agree(proposal));
  refuse_equal_tokens(group_, samples, tokens ? tokens->tokens() : LocalTokens());
  has_compared_ = true;
}

// Sums counts [n, B * E + B] to [E + 1].
OwnedTensor DeviceCounts::sum(const ConstTensorView& counts, int64_t num_sequences) {
  OwnedTensor sum = memory_.take(DType::kI64, {config_.router.num_experts + 1}, stream_);
  router::sum_batches_on_device({.counts = counts, .num_sequences = num_sequences, .sum = sum.view},
                                stream_);
  return sum;
}

// A plan of to_all_. A plan made during a capture is filled only by replays of that graph, so calls
// outside the capture make their own.
Plan DeviceCounts::plan_to_all(Device device) {
  if (plan_.valid()) return plan_;
  const int64_t P = group_.size();
  OwnedTensor map;
  OwnedTensor weights;
  bool captured = false;
  run_agreed(group_, [&] {
    captured = is_captured(stream_, device);
    map = memory_.take(DType::kBool, {1, P}, stream_);
    weights = memory_.take(DType::kF32, {1, P}, stream_);
    memory_.fill(map.view, 1, stream_);
    memory_.fill(weights.view, 0, stream_);
  });
  Plan plan = to_all_.plan(DenseRouting{.map = map.view, .weights = weights.view});
  if (captured) {
    captured_plans_.push_back(plan);
  } else {
    plan_ = plan;
  }
  return plan;
}

// Gathers the counts [E + 1] of all ranks: [P, E + 1].
OwnedTensor DeviceCounts::gather(const ConstTensorView& own) {
  const int64_t P = group_.size();
  const int64_t count = own.num_elements();
  const Plan plan = plan_to_all(own.device);
  const ConstTensorView row{own.data, DType::kF32, {1, kValuesPerCount * count}, own.device};
  OwnedTensor rows = to_all_.dispatch(plan, {.x = row}).rows;
  rows.view = TensorView{rows.view.data, DType::kI64, {P, count}, own.device};
  return rows;
}

void DeviceCounts::count(const MoeForwardArgs& args, MoeDecision& decision) {
  const RouterStatistics& own = decision.router->statistics;
  const ConstTensorView counts = own.device_counts.view;
  RouterStatistics batch;
  run_agreed(group_, [&] {
    const ConstTensorView one_row{
        counts.data, counts.dtype, {1, counts.num_elements()}, counts.device};
    batch.device_counts = sum(one_row, own.num_sequences);
  });
  if (group_.size() > 1) {
    const OwnedTensor of_ranks = gather(batch.device_counts.view);
    run_agreed(group_, [&] { batch.device_counts = sum(of_ranks.view, 1); });
  }
  run_agreed(group_, [&] { set_counts(args, batch, decision); });
}

// The host does not know the number of tokens: the losses take it from batch_statistics.
void DeviceCounts::set_counts(const MoeForwardArgs& args, const RouterStatistics& batch,
                              MoeDecision& decision) const {
  decision.device_load = batch;
  decision.batch_statistics = batch;
  decision.total_sequences = static_cast<double>(args.total_sequences);
  const RouterStatistics& own = decision.router->statistics;
  if (counts(BalanceScope::kGlobalBatch)) {
    const bool adds = args.earlier != nullptr;
    decision.statistics = adds ? router_.sum(batch, *args.earlier, stream_) : batch;
  } else {
    decision.statistics = counts(BalanceScope::kBatch) ? batch : own;
  }
  if (counts(BalanceScope::kSequence)) decision.sequence_statistics = own;
}

}  // namespace crossdock
