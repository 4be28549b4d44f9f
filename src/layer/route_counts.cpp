#include "layer/route_counts.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "comm/agreement/items.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "router/backend.hpp"
#include "router/choice.hpp"

namespace crossdock {
namespace {

constexpr int64_t kSampledTokens = 16;
constexpr int64_t kSampledBytes = 512;  // of each
constexpr int64_t kFewestCompared = 8;  // fewer tokens may be equal by chance

bool is_used(const LocalTokens& tokens, int64_t t) {
  return !tokens.mask.given() || !pointer<bool>(tokens.mask)[t];
}

int64_t count_used(const LocalTokens& tokens) {
  const int64_t T = tokens.x.num_rows();
  if (!tokens.mask.given()) return T;
  return std::count(pointer<bool>(tokens.mask), pointer<bool>(tokens.mask) + T, false);
}

// A few of `count` used tokens, spread evenly from the first to the last.
std::vector<int64_t> choose_tokens(const LocalTokens& tokens, int64_t count) {
  std::vector<int64_t> numbers;  // among the used tokens, ascending
  const int64_t num_chosen = std::min(count, kSampledTokens);
  for (int64_t i = 0; i < num_chosen; ++i) {
    numbers.push_back(num_chosen == 1 ? 0 : i * (count - 1) / (num_chosen - 1));
  }
  if (!tokens.mask.given()) return numbers;
  std::vector<int64_t> chosen;
  int64_t number = 0;
  for (int64_t t = 0; chosen.size() < numbers.size(); ++t) {
    if (is_used(tokens, t) && number++ == numbers[chosen.size()]) chosen.push_back(t);
  }
  return chosen;
}

uint64_t hash_bytes(uint64_t hash, const std::byte* bytes, int64_t num_bytes) {
  constexpr int64_t kWord = sizeof(uint64_t);
  for (int64_t i = 0; i < num_bytes; i += kWord) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, static_cast<size_t>(std::min(kWord, num_bytes - i)));
    hash = router::mix(hash ^ word);
  }
  return hash;
}

// Number and place of the tokens, as the start of a hash.
uint64_t hash_of_sizes(const LocalTokens& tokens, int64_t count) {
  return router::mix(static_cast<uint64_t>(count) ^
                     router::mix(static_cast<uint64_t>(tokens.first)));
}

// The first two ranks with equal nonzero values.
std::optional<std::pair<size_t, size_t>> find_equal(std::span<const uint64_t> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return values[a] != values[b] ? values[a] < values[b] : a < b;
  });
  std::optional<std::pair<size_t, size_t>> first;
  for (size_t i = 1; i < order.size(); ++i) {
    const std::pair<size_t, size_t> pair{order[i - 1], order[i]};
    if (values[pair.first] == 0 || values[pair.first] != values[pair.second]) continue;
    if (!first || pair < *first) first = pair;
  }
  return first;
}

}  // namespace

uint64_t sample_tokens(const LocalTokens& tokens) {
  const int64_t count = count_used(tokens);
  if (count == 0) return 0;
  const int64_t row_bytes = tokens.x.row_bytes();
  uint64_t hash = hash_of_sizes(tokens, count);
  for (const int64_t t : choose_tokens(tokens, count)) {
    hash = hash_bytes(hash, pointer<std::byte>(tokens.x) + t * row_bytes,
                      std::min(row_bytes, kSampledBytes));
  }
  return std::max<uint64_t>(hash, 1);
}

uint64_t sample_to_compare(const LocalTokens& tokens) {
  return count_used(tokens) < kFewestCompared ? 0 : sample_tokens(tokens);
}

uint64_t hash_tokens(const LocalTokens& tokens) {
  const int64_t count = count_used(tokens);
  if (count == 0) return 0;
  const int64_t row_bytes = tokens.x.row_bytes();
  uint64_t hash = hash_of_sizes(tokens, count);
  for (int64_t t = 0; t < tokens.x.num_rows(); ++t) {
    if (!is_used(tokens, t)) continue;
    hash = hash_bytes(hash, pointer<std::byte>(tokens.x) + t * row_bytes, row_bytes);
  }
  return std::max<uint64_t>(hash, 1);
}

void refuse_equal_tokens(Group& group, std::span<const uint64_t> samples,
                         const LocalTokens& tokens) {
  if (!find_equal(samples)) return;
  uint64_t own = 0;
  const std::optional<Error> refusal = refusal_of([&] {
    if (samples[static_cast<size_t>(group.rank())] != 0) own = hash_tokens(tokens);
  });
  const Agreement agreement = group.agree(
      {.operation = "compare_tokens", .body = body_of(own), .refusal = as_refusal(refusal)});
  const auto equal = find_equal(items_of<uint64_t>(agreement));
  CROSSDOCK_CHECK(!equal, "tokens must be different on every rank, but those of ranks ",
                  equal->first, " and ", equal->second,
                  " are bit-identical and would count twice in the gradients; set "
                  "replicated_over to the group that they are replicated over, or "
                  "allow_equal_tokens if they are meant to be tokens of their own");
}

namespace {

std::vector<std::byte> read(const ConstTensorView& tensor, Stream stream) {
  std::vector<std::byte> bytes(tensor.given() ? static_cast<size_t>(tensor.num_bytes()) : 0);
  if (!bytes.empty()) router::read_device(tensor, bytes, stream);
  return bytes;
}

}  // namespace

HostTokens::HostTokens(const LocalTokens& on_gpu, Stream stream)
    : x_(read(on_gpu.x, stream)), mask_(read(on_gpu.mask, stream)), tokens_(on_gpu) {
  tokens_.x = {x_.data(), on_gpu.x.dtype, on_gpu.x.shape};
  if (on_gpu.mask.given()) tokens_.mask = {mask_.data(), on_gpu.mask.dtype, on_gpu.mask.shape};
}

namespace {

// A rank's body: [B | routes B x E | tokens B | sample].
std::pair<RouterStatistics, uint64_t> unpack(std::span<const std::byte> body) {
  std::vector<int64_t> packed(body.size() / sizeof(int64_t));
  CROSSDOCK_ASSERT(packed.size() >= 2);
  std::memcpy(packed.data(), body.data(), packed.size() * sizeof(int64_t));
  RouterStatistics statistics;
  statistics.num_sequences = packed[0];
  const auto end = packed.end() - 1;
  const auto tokens = end - statistics.num_sequences;
  statistics.routes_per_expert.assign(packed.begin() + 1, tokens);
  statistics.num_tokens.assign(tokens, end);
  return {std::move(statistics), static_cast<uint64_t>(packed.back())};
}

RouterStatistics sum(const std::vector<RouterStatistics>& statistics) {
  RouterStatistics total = statistics[0];
  for (size_t i = 1; i < statistics.size(); ++i) total.add(statistics[i]);
  return total;
}

int64_t num_tokens(const RouterStatistics& statistics) {
  return std::accumulate(statistics.num_tokens.begin(), statistics.num_tokens.end(), int64_t{0});
}

double num_sequences_with_tokens(const RouterStatistics& statistics) {
  return static_cast<double>(std::count_if(statistics.num_tokens.begin(),
                                           statistics.num_tokens.end(),
                                           [](int64_t tokens) { return tokens > 0; }));
}

// Sums over all sequences.
RouterStatistics of_batch(const RouterStatistics& statistics) {
  return {.num_sequences = 1,
          .routes_per_expert = statistics.load(),
          .num_tokens = {num_tokens(statistics)}};
}

RouterStatistics sum_batches(const std::vector<RouterStatistics>& ranks) {
  std::vector<RouterStatistics> batches;
  batches.reserve(ranks.size());
  for (const RouterStatistics& rank : ranks) batches.push_back(of_batch(rank));
  return sum(batches);
}

}  // namespace

Group* RouteCounts::sequence_group() const {
  if (!counts(BalanceScope::kSequence)) return nullptr;
  if (groups_.sequences != nullptr) return groups_.sequences;
  return groups_.counting != nullptr ? groups_.counting : groups_.replicated;
}

bool RouteCounts::sequences_are_replicated() const {
  return groups_.sequences == nullptr && groups_.counting == nullptr && sequence_group() != nullptr;
}

std::vector<Group*> RouteCounts::other_groups() const {
  std::vector<Group*> others;
  for (Group* group : {sequence_group(), groups_.counting}) {
    const bool is_new = std::find(others.begin(), others.end(), group) == others.end();
    if (group != nullptr && group != &group_ && is_new) others.push_back(group);
  }
  return others;
}

std::string RouteCounts::counts_text(const Group& group, const MoeForwardArgs& args) const {
  const bool by_sequence = counts(BalanceScope::kSequence);
  const bool each_rank = by_sequence && sequence_group() == nullptr && &group == &group_;
  const bool shares_sequences = by_sequence && sequence_group() == &group;
  std::string text;
  if (shares_sequences) text += concat(";num_sequences=", args.num_sequences);
  if (shares_sequences || each_rank) text += concat(";total_sequences=", args.total_sequences);
  if (&group != batch_group()) return text;
  // Counts on a GPU are not compared.
  if (!args.x.device.is_cpu()) return text + concat(";earlier=", args.earlier != nullptr);
  const int64_t earlier = args.earlier != nullptr ? num_tokens(*args.earlier) : 0;
  return text + concat(";earlier_tokens=", earlier);
}

std::vector<int64_t> RouteCounts::pack(const ForwardCall& call, const MoeDecision& decision) const {
  const RouterStatistics& own = decision.router->statistics;
  std::vector<int64_t> packed = {own.num_sequences};
  packed.insert(packed.end(), own.routes_per_expert.begin(), own.routes_per_expert.end());
  packed.insert(packed.end(), own.num_tokens.begin(), own.num_tokens.end());
  const uint64_t sample = config_.allow_equal_tokens ? 0 : sample_to_compare(call.tokens);
  packed.push_back(static_cast<int64_t>(sample));
  return packed;
}

// In the layer's group or another one. Throws the refusal of any rank on all ranks.
RouteCounts::RankCounts RouteCounts::exchange(Group& group, const ForwardCall& call,
                                              const MoeDecision& decision,
                                              const std::optional<Error>& refusal) const {
  std::vector<int64_t> packed;
  const std::optional<Error> failed = refusal_of([&] {
    if (refusal) throw *refusal;
    packed = pack(call, decision);
  });
  const bool is_layer = &group == &group_;
  const Agreement agreement = group.agree(
      {.operation = is_layer ? "route" : "count",
       .config = concat(is_layer ? call.config_text : "", counts_text(group, call.args)),
       .body = std::as_bytes(std::span(packed)),
       .refusal = as_refusal(failed)});
  RankCounts counts;
  run_agreed(group, [&] {
    for (int rank = 0; rank < group.size(); ++rank) {
      auto [statistics, sample] = unpack(agreement.body(rank));
      counts.statistics.push_back(std::move(statistics));
      counts.samples.push_back(sample);
    }
  });
  refuse_equal_tokens(group, counts.samples, call.tokens);
  return counts;
}

// After a mismatch, not all ranks of the layer's group would join.
void RouteCounts::refuse_in_other_groups(const MoeForwardArgs& args, const Error& refusal) const {
  for (Group* other : other_groups()) {
    if (group_.is_poisoned()) other->fail(refusal);
    if (group_.is_poisoned() || refusal.code() == ErrorCode::kMismatch) continue;
    refusal_of([&] {
      other->agree(
          {.operation = "count", .config = counts_text(*other, args), .refusal = &refusal});
    });
  }
}

// The ranks of the layer's group may be in different other groups: a rank that fails to count tells
// all of them. If the sequences are replicated, their number in the layer's group is the sum of the
// ranks' shares.
std::map<Group*, RouteCounts::RankCounts> RouteCounts::exchange_in_other_groups(
    const ForwardCall& call, MoeDecision& decision) const {
  std::map<Group*, RankCounts> of_group;
  std::optional<Error> refusal;
  double share = 0.0;
  for (Group* other : other_groups()) {
    const std::optional<Error> failed = refusal_of([&] {
      RankCounts counts = exchange(*other, call, decision, refusal);
      if (other == sequence_group()) {
        share = num_sequences_with_tokens(sum(counts.statistics)) / other->size();
      }
      of_group[other] = std::move(counts);
    });
    if (!refusal) refusal = failed;
  }
  if (other_groups().empty()) return of_group;
  const Agreement agreement = group_.agree(
      {.operation = "counted", .body = body_of(share), .refusal = as_refusal(refusal)});
  if (sequences_are_replicated() && sequence_group() != &group_) {
    double total = 0.0;
    for (int rank = 0; rank < group_.size(); ++rank) total += item_of<double>(agreement, rank);
    decision.total_sequences = total;
  }
  return of_group;
}

void RouteCounts::agree(const ForwardCall& call, const std::optional<Error>& refusal,
                        MoeDecision& decision) {
  RankCounts own_group;
  try {
    own_group = exchange(group_, call, decision, refusal);
  } catch (const Error& error) {
    refuse_in_other_groups(call.args, error);
    throw;
  }
  std::map<Group*, RankCounts> of_group = exchange_in_other_groups(call, decision);
  run_agreed(group_, [&] {
    of_group[&group_] = std::move(own_group);
    set_counts(call, of_group, decision);
  });
}

void RouteCounts::set_counts(const ForwardCall& call, const std::map<Group*, RankCounts>& of_group,
                             MoeDecision& decision) const {
  decision.load = sum_batches(of_group.at(&group_).statistics).routes_per_expert;
  RouterStatistics batch = sum_batches(of_group.at(batch_group()).statistics);
  decision.total_tokens = num_tokens(batch);
  const bool by_sequence = counts(BalanceScope::kSequence);
  const bool by_batch = counts(BalanceScope::kBatch);
  const bool by_global_batch = counts(BalanceScope::kGlobalBatch);
  if (!by_sequence) decision.total_sequences = num_sequences_with_tokens(batch);
  if (by_sequence) decision.sequence_statistics = count_sequences(of_group, decision);
  if (call.args.total_sequences > 0) {
    decision.total_sequences = static_cast<double>(call.args.total_sequences);
  }
  if (by_global_batch) {
    if (by_batch) decision.batch_statistics = batch;
    if (call.args.earlier != nullptr) batch.add(*call.args.earlier);
  }
  if (by_global_batch || by_batch) {
    decision.statistics = std::move(batch);
  } else {
    decision.statistics = *std::exchange(decision.sequence_statistics, std::nullopt);
  }
}

// The counts of each sequence. Sets total_sequences unless it is already known.
RouterStatistics RouteCounts::count_sequences(const std::map<Group*, RankCounts>& of_group,
                                              MoeDecision& decision) const {
  Group* shared = sequence_group();
  if (shared == nullptr) {
    for (const RouterStatistics& rank : of_group.at(&group_).statistics) {
      decision.total_sequences += num_sequences_with_tokens(rank);
    }
    return decision.router->statistics;
  }
  RouterStatistics statistics = sum(of_group.at(shared).statistics);
  const bool is_known = sequences_are_replicated() && shared != &group_;
  if (!is_known) decision.total_sequences = num_sequences_with_tokens(statistics);
  return statistics;
}

// A GPU counts only sequences whose counts it holds: those of the sequence group, or this rank's
// own.
void RouteCounts::check_on_gpu(const MoeForwardArgs& args) const {
  const Group* shared = sequence_group();
  const bool has_all =
      shared == nullptr ? group_.size() == 1 : shared == &group_ || !sequences_are_replicated();
  const bool needs_number = counts(BalanceScope::kSequence) && args.decision == nullptr;
  if (!needs_number || has_all || args.total_sequences > 0) return;
  throw Error(ErrorCode::kUnsupported,
              "set total_sequences to the number of sequences in the group: with tokens on GPUs of "
              "several ranks, the layer does not count them");
}

void check_earlier(const RouterConfig& config, const RouterStatistics* earlier, Device device) {
  if (earlier == nullptr) return;
  CROSSDOCK_CHECK(config.counts(BalanceScope::kGlobalBatch),
                  "earlier is for BalanceScope::kGlobalBatch; leave it out with other scopes");
  const bool is_there =
      earlier->is_on_device() ? earlier->device_counts.view.device == device : device.is_cpu();
  CROSSDOCK_CHECK(is_there, "earlier must be where the tokens are, ", describe(device));
  const int64_t num_routes = earlier->is_on_device()
                                 ? earlier->device_counts.view.num_elements() - 1
                                 : std::ssize(earlier->routes_per_expert);
  const int64_t num_tokens = earlier->is_on_device() ? 1 : std::ssize(earlier->num_tokens);
  CROSSDOCK_CHECK(
      earlier->num_sequences == 1 && num_tokens == 1 && num_routes == config.num_experts,
      "earlier must be the statistics of an earlier micro-batch of this layer: ",
      config.num_experts, " counts of routes and 1 of tokens, got ", num_routes, " and ",
      num_tokens);
}

}  // namespace crossdock
