#include "plan/plan_builder.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "core/text.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/plan.hpp"
#include "plan/config_check.hpp"
#include "plan/local_routes.hpp"
#include "plan/placement.hpp"

namespace crossdock {

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
