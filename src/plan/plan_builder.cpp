#include "plan/plan_builder.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "core/text.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/plan.hpp"
#include "plan/local_routes.hpp"
#include "plan/placement.hpp"

namespace crossdock {
namespace {

// The counts of all experts are kept for every rank; more experts are assumed to be a mistake.
constexpr int64_t kMaxExperts = int64_t{1} << 20;
constexpr int64_t kMaxPaddedRows = std::numeric_limits<int32_t>::max();
constexpr std::array<int64_t, 7> kAlignments = {1, 8, 16, 32, 64, 128, 256};

void check_capacity(const DispatchConfig& config, int num_ranks) {
  const Capacity& capacity = *config.capacity;
  CROSSDOCK_CHECK(std::isfinite(capacity.factor) && capacity.factor > 0,
                  "the capacity factor must be positive and finite, got ", capacity.factor);
  if (!capacity.pad_to_capacity) return;
  CROSSDOCK_CHECK(capacity.max_tokens >= 1,
                  "pad_to_capacity needs max_tokens, the largest number of tokens of any rank; "
                  "it must be at least 1, got ",
                  capacity.max_tokens);
  const int64_t rows = capacity_rows(config, capacity.max_tokens);
  CROSSDOCK_CHECK(
      row_bytes_fit_int64({rows + config.alignment, config.num_experts, num_ranks}, config),
      "capacity factor ", capacity.factor, " with max_tokens ", capacity.max_tokens, " asks for ",
      rows, " rows per expert and rank, more than can be counted");
}

// REQUIRES: a checked placement.
int64_t most_local_experts(const DispatchConfig& config, int num_ranks) {
  std::vector<int64_t> num_experts(index(num_ranks), 0);
  for (const int32_t owner : make_placement(config, num_ranks).owner) ++num_experts[index(owner)];
  return std::ranges::max(num_experts);
}

// With pad_to_capacity, the rows of a rank do not depend on the routing.
void check_padded_rows(const DispatchConfig& config, int num_ranks) {
  const int64_t rows = padded_rows_per_source(config);
  if (rows == 0) return;
  const int64_t num_segments = most_local_experts(config, num_ranks);
  CROSSDOCK_CHECK(product_within(kMaxPaddedRows, {rows, num_ranks, num_segments}),
                  "pad_to_capacity with capacity factor ", config.capacity->factor,
                  " and max_tokens ", config.capacity->max_tokens, " pads the ", num_segments,
                  " experts of a rank to ", rows, " rows for each of ", num_ranks,
                  " ranks; a rank can have at most ", kMaxPaddedRows,
                  " rows in all: reduce max_tokens to the largest number of tokens of any rank");
}

}  // namespace

bool row_bytes_fit_int64(std::initializer_list<int64_t> num_rows, const DispatchConfig& config) {
  const auto rows = product_within(kMaxBytes, num_rows);
  return rows && product_within(kMaxBytes, {*rows, config.width, int64_t{sizeof(double)}});
}

void check_config(const DispatchConfig& config, int num_ranks) {
  CROSSDOCK_CHECK(config.num_experts >= 1 && config.num_experts <= kMaxExperts,
                  "num_experts must be in [1, ", kMaxExperts, "], got ", config.num_experts);
  CROSSDOCK_CHECK(config.top_k >= 1, "top_k must be at least 1, got ", config.top_k);
  CROSSDOCK_CHECK(config.top_k <= config.num_experts, "num_experts (", config.num_experts,
                  ") must be at least top_k (", config.top_k, ")");
  CROSSDOCK_CHECK(config.width >= 1 && config.width <= kMaxWidth, "width must be in [1, ",
                  kMaxWidth, "], got ", config.width);
  CROSSDOCK_CHECK(
      std::find(kAlignments.begin(), kAlignments.end(), config.alignment) != kAlignments.end(),
      "alignment must be 1, 8, 16, 32, 64, 128 or 256, got ", config.alignment);
  CROSSDOCK_CHECK(
      config.max_routes_per_token == 0 || (config.max_routes_per_token >= config.top_k &&
                                           config.max_routes_per_token <= config.num_experts),
      "max_routes_per_token must be 0 (no bound) or from top_k (", config.top_k,
      ") to num_experts (", config.num_experts, "), got ", config.max_routes_per_token);
  if (config.capacity) check_capacity(config, num_ranks);
  if (!config.placement.empty()) {
    const auto num_placed = static_cast<int64_t>(config.placement.size());
    CROSSDOCK_CHECK(num_placed == config.num_experts,
                    "placement must name the rank of each of the ", config.num_experts,
                    " experts, got ", num_placed, " entries");
    for (size_t expert = 0; expert < config.placement.size(); ++expert) {
      CROSSDOCK_CHECK(config.placement[expert] >= 0 && config.placement[expert] < num_ranks,
                      "placement of expert ", expert, " must be a rank in [0, ", num_ranks,
                      "), got ", config.placement[expert]);
    }
  }
  check_padded_rows(config, num_ranks);
  CROSSDOCK_CHECK(!config.max_rows || *config.max_rows >= 0, "max_rows must not be negative, got ",
                  config.max_rows.value_or(0));
  CROSSDOCK_CHECK(row_bytes_fit_int64({config.max_rows.value_or(0)}, config), "max_rows (",
                  config.max_rows.value_or(0), ") rows of width ", config.width,
                  " are more than can be counted");
}

std::string config_text(const DispatchConfig& config, std::string_view strategy_name,
                        std::string_view candidates) {
  std::ostringstream out;
  out << std::setprecision(17);
  out << "num_experts=" << config.num_experts << ";top_k=" << config.top_k
      << ";width=" << config.width << ";alignment=" << config.alignment << ";capacity_factor=";
  if (config.capacity) {
    const Capacity& capacity = *config.capacity;
    out << capacity.factor
        << ";drop_policy=" << (capacity.policy == DropPolicy::kWeight ? "weight" : "position")
        << ";pad_to_capacity=" << capacity.pad_to_capacity << ";max_tokens=" << capacity.max_tokens;
  } else {
    out << "none";
  }
  out << ";placement=";
  if (config.placement.empty()) out << "contiguous";
  for (size_t expert = 0; expert < config.placement.size(); ++expert) {
    out << (expert > 0 ? "," : "") << config.placement[expert];
  }
  out << ";partial_sums=" << name_of(config.partial_sums)
      << ";nonfinite=" << (config.nonfinite == NonFinite::kReject ? "reject" : "propagate")
      << ";max_rows=";
  if (config.max_rows) {
    out << *config.max_rows;
  } else {
    out << "none";
  }
  if (config.keep_empty_segments) out << ";keep_empty_segments=1";
  if (config.max_routes_per_token != 0) {
    out << ";max_routes_per_token=" << config.max_routes_per_token;
  }
  if (config.copies != Copies::kAuto) out << ";copies=" << name_of(config.copies);
  if (!candidates.empty()) out << ";candidates=" << candidates;
  // Last, because "auto" depends on all the other settings.
  out << ";strategy=" << strategy_name;
  return out.str();
}

PartialSums parse_partial_sums(std::string_view name) {
  return static_cast<PartialSums>(index_of_name("partial_sums", name, kPartialSumsNames));
}

Copies parse_copies(std::string_view name) {
  return static_cast<Copies>(index_of_name("copies", name, kCopiesNames));
}

Plan::Plan(std::shared_ptr<const PlanData> data, std::shared_ptr<const void> strategy_state,
           std::shared_ptr<const DevicePlanData> device_data)
    : data_(std::move(data)),
      strategy_state_(std::move(strategy_state)),
      device_data_(std::move(device_data)) {}

uint64_t Plan::id() const {
  return data_->id;
}

Device Plan::device() const {
  return device_data_ ? device_data_->device() : Device{};
}

int64_t Plan::num_tokens() const {
  return data_->T;
}

int64_t Plan::num_rows() const {
  return device_data_ ? device_data_->num_rows() : data_->num_rows();
}

int64_t Plan::capacity_rows() const {
  return device_data_ ? device_data_->capacity_rows() : data_->num_rows();
}

int64_t Plan::num_local_experts() const {
  return data_->num_local_experts();
}

Segments Plan::segments() const& {
  if (device_data_) return device_data_->segments();
  return {.starts = data_->local_starts.data(),
          .counts = data_->local_counts.data(),
          .num_segments = data_->num_local_experts(),
          .device = {}};
}

std::span<const int64_t> Plan::dropped() const& {
  return device_data_ ? device_data_->dropped() : std::span<const int64_t>(data_->dropped);
}

ConstTensorView Plan::weights() const& {
  if (device_data_) return device_data_->weights();
  return {data_->weights.data(), data_->weight_dtype, {data_->T, data_->K}};
}

Plan Plan::with_device_data(std::shared_ptr<const DevicePlanData> device_data) const {
  return {data_, strategy_state_, std::move(device_data)};
}

namespace {

std::span<const int32_t> experts_of(const PlanData& plan, int rank) {
  const int64_t first = plan.owner_offsets[index(rank)];
  const int64_t last = plan.owner_offsets[index(rank) + 1];
  return std::span(plan.experts_by_owner).subspan(index(first), index(last - first));
}

int64_t count_of(const PlanData& plan, int source, int64_t expert) {
  return plan.counts[index(source * plan.E + expert)];
}

int64_t source_start(const PlanData& plan, int source, int64_t expert) {
  return plan.source_starts[index(source * plan.E + expert)];
}

constexpr size_t kPackedTokens = 0;
constexpr size_t kPackedSlots = 1;
constexpr size_t kPackedCounts = 2;

void take_counts(const PlanInputs& inputs, PlanData& plan) {
  plan.tokens_per_rank.resize(index(plan.P));
  plan.counts.resize(index(plan.P * plan.E));
  for (int source = 0; source < plan.P; ++source) {
    const std::span<const int64_t> packed = inputs.packed_counts[index(source)];
    CROSSDOCK_ASSERT(packed.size() == index(plan.E) + kPackedCounts);
    plan.tokens_per_rank[index(source)] = packed[kPackedTokens];
    std::copy(packed.begin() + kPackedCounts, packed.end(), plan.counts.begin() + source * plan.E);
  }
}

// Sets where each expert's segment starts at its owner, and each source within the segment.
void lay_out_segments(PlanData& plan) {
  const int64_t padded = padded_rows_per_source(*plan.config);
  plan.source_starts.resize(index(plan.P * plan.E));
  std::vector<int64_t> segment_rows(index(plan.E), 0);
  for (int source = 0; source < plan.P; ++source) {
    for (int64_t e = 0; e < plan.E; ++e) {
      plan.source_starts[index(source * plan.E + e)] = segment_rows[index(e)];
      segment_rows[index(e)] += padded > 0 ? padded : count_of(plan, source, e);
    }
  }
  plan.segment_starts.resize(index(plan.E));
  plan.rows_per_rank.assign(index(plan.P), 0);
  for (int64_t e = 0; e < plan.E; ++e) {
    int64_t& rows = plan.rows_per_rank[index(plan.owner[index(e)])];
    plan.segment_starts[index(e)] = rows;
    const int64_t least_rows = plan.config->keep_empty_segments ? 1 : 0;
    rows += round_up(std::max(segment_rows[index(e)], least_rows), plan.config->alignment);
  }
  for (const int32_t e : experts_of(plan, plan.rank)) {
    plan.local_starts.push_back(plan.segment_starts[index(e)]);
    plan.local_counts.push_back(segment_rows[index(e)]);
  }
  plan.local_starts.push_back(plan.num_rows());
}

// A counting sort of the routes by (owner, expert), stable in (token, slot).
void lay_out_sends(PlanData& plan) {
  std::vector<int64_t> next_sent(index(plan.E));  // [E] send position of the next route
  std::vector<int64_t> next_row(index(plan.E));   // [E] final row of the next route
  int64_t num_sent = 0;
  plan.send_offsets.push_back(0);
  for (int owner = 0; owner < plan.P; ++owner) {
    for (const int32_t e : experts_of(plan, owner)) {
      next_sent[index(e)] = num_sent;
      next_row[index(e)] = plan.segment_starts[index(e)] + source_start(plan, plan.rank, e);
      num_sent += count_of(plan, plan.rank, e);
    }
    plan.send_offsets.push_back(num_sent);
  }
  const size_t num_slots = plan.expert_ids.size();
  plan.final_rows.assign(num_slots, -1);
  plan.send_positions.assign(num_slots, -1);
  plan.sent_routes.resize(index(num_sent));
  for (size_t slot = 0; slot < num_slots; ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const auto e = index(plan.expert_ids[slot]);
    plan.final_rows[slot] = next_row[e]++;
    plan.send_positions[slot] = next_sent[e]++;
    plan.sent_routes[index(plan.send_positions[slot])] = static_cast<int64_t>(slot);
  }
}

void lay_out_arrivals(PlanData& plan) {
  int64_t num_received = 0;
  plan.recv_offsets.push_back(0);
  for (int source = 0; source < plan.P; ++source) {
    for (const int32_t e : experts_of(plan, plan.rank)) {
      const int64_t count = count_of(plan, source, e);
      if (count == 0) continue;
      plan.recv_blocks.push_back(
          {.source = source,
           .arrival = num_received,
           .row = plan.segment_starts[index(e)] + source_start(plan, source, e),
           .count = count});
      num_received += count;
    }
    plan.recv_offsets.push_back(num_received);
  }
}

}  // namespace

std::vector<int64_t> pack_counts(const LocalRoutes& routes) {
  std::vector<int64_t> packed{routes.T, routes.K};
  packed.insert(packed.end(), routes.counts.begin(), routes.counts.end());
  return packed;
}

int64_t agreed_slots(const PlanInputs& inputs) {
  int64_t slots = 0;
  for (const auto& packed : inputs.packed_counts) slots = std::max(slots, packed[kPackedSlots]);
  return slots;
}

PlanData build_plan(const PlanInputs& inputs, LocalRoutes routes) {
  PlanData plan;
  plan.config = inputs.config;
  plan.T = routes.T;
  plan.K = routes.K;
  plan.E = inputs.config->num_experts;
  plan.P = inputs.P;
  plan.rank = inputs.rank;
  plan.id = inputs.id;

  Placement placement = make_placement(*inputs.config, inputs.P);
  plan.owner = std::move(placement.owner);
  plan.experts_by_owner = std::move(placement.experts_by_owner);
  plan.owner_offsets = std::move(placement.owner_offsets);

  plan.expert_ids = std::move(routes.expert_ids);
  plan.dropped = std::move(routes.dropped);
  plan.weights = std::move(routes.weights);
  plan.weight_dtype = routes.weight_dtype;

  take_counts(inputs, plan);
  lay_out_segments(plan);
  lay_out_sends(plan);
  lay_out_arrivals(plan);
  return plan;
}

PlanData part_of_plan(const PlanData& plan, const ExpertChunk& chunk) {
  PlanData part;
  part.T = plan.T;
  part.K = plan.K;
  part.E = plan.E;
  part.P = plan.P;
  part.rank = plan.rank;
  part.id = plan.id;
  part.config = plan.config;
  part.owner = plan.owner;
  part.experts_by_owner = plan.experts_by_owner;
  part.owner_offsets = plan.owner_offsets;
  part.tokens_per_rank = plan.tokens_per_rank;
  part.segment_starts = plan.segment_starts;
  part.source_starts = plan.source_starts;
  part.rows_per_rank = plan.rows_per_rank;
  part.weight_dtype = plan.weight_dtype;
  // The same memory, kept alive by its owner.
  part.weights = Buffer(std::const_pointer_cast<void>(plan.weights.owner()), plan.weights.data(),
                        plan.weights.num_bytes(), plan.weights.device());
  part.dropped.assign(index(plan.E), 0);

  part.counts.assign(plan.counts.size(), 0);
  for (int owner = 0; owner < plan.P; ++owner) {
    const std::span<const int32_t> experts = experts_of(plan, owner);
    for (int64_t i = chunk.first_expert[index(owner)]; i < chunk.last_expert[index(owner)]; ++i) {
      for (int source = 0; source < plan.P; ++source) {
        const auto place = index(source * plan.E + experts[index(i)]);
        part.counts[place] = plan.counts[place];
      }
    }
  }
  part.expert_ids = plan.expert_ids;
  for (size_t slot = 0; slot < part.expert_ids.size(); ++slot) {
    int32_t& expert = part.expert_ids[slot];
    if (expert < 0) continue;
    if (!chunk.holds(plan.owner[index(expert)], plan.final_rows[slot])) expert = -1;
  }
  lay_out_sends(part);
  lay_out_arrivals(part);
  return part;
}

void check_max_rows(const PlanData& plan) {
  int64_t total = 0;  // rows sent or received on all ranks
  for (const int64_t rows : plan.rows_per_rank) total += rows;
  for (const int64_t tokens : plan.tokens_per_rank) total += tokens * plan.K;
  CROSSDOCK_CHECK(row_bytes_fit_int64({total}, *plan.config), "a plan of ", total,
                  " rows of width ", plan.config->width, " is more than can be counted");
  if (!plan.config->max_rows) return;
  const auto most = std::max_element(plan.rows_per_rank.begin(), plan.rows_per_rank.end());
  if (*most <= *plan.config->max_rows) return;
  const auto rank = static_cast<int>(most - plan.rows_per_rank.begin());
  throw Error(ErrorCode::kCapacity,
              concat("rank ", rank, " would receive ", *most, " rows, more than max_rows (",
                     *plan.config->max_rows, "); max_rows must be at least ", *most),
              {.culprit = rank, .sequence = plan.id, .operation = "plan"});
}

std::vector<RowRange> pad_rows(const PlanData& plan) {
  std::vector<RowRange> pads;
  int64_t filled = 0;
  const auto fill_to = [&](int64_t row) {
    if (row > filled) pads.push_back({.first = filled, .count = row - filled});
    filled = row;
  };
  for (const int32_t e : experts_of(plan, plan.rank)) {
    for (int source = 0; source < plan.P; ++source) {
      const int64_t count = count_of(plan, source, e);
      if (count == 0) continue;
      fill_to(plan.segment_starts[index(e)] + source_start(plan, source, e));
      filled += count;
    }
  }
  fill_to(plan.num_rows());
  return pads;
}

}  // namespace crossdock
