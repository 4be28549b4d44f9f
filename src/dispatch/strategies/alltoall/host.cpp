#include <memory>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/wire.hpp"
#include "dispatch/path.hpp"
#include "dispatch/strategies/list.hpp"
#include "ops/copy_rows.hpp"
#include "plan/plan_builder.hpp"

namespace crossdock {
namespace {

// Copies every token to the send buffer, by destination, or to its final row if it stays.
Buffer pack(const StrategyCall& call, const ExchangedRows& travelling, const RowPart& part) {
  const PlanData& plan = call.plan.data();
  Buffer packed = call.group.pool().take_scratch(travelling.num_sent() * part.row_bytes);
  std::vector<std::byte*> destinations(plan.expert_ids.size(), nullptr);
  for (size_t slot = 0; slot < destinations.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const bool stays = plan.owner[static_cast<size_t>(plan.expert_ids[slot])] == plan.rank;
    destinations[slot] =
        stays ? part.rows + plan.final_rows[slot] * part.row_bytes
              : packed.data() + travelling.send_index(plan.send_positions[slot]) * part.row_bytes;
  }
  ops::fan_out({.x = part.tokens,
                .destinations = destinations.data(),
                .T = plan.T,
                .K = plan.K,
                .row_bytes = part.row_bytes},
               *call.group.threads());
  return packed;
}

// Copies arrivals, ordered by (source, expert), to final rows, ordered by (expert, source).
void regroup(const ExchangedRows& travelling, const Buffer& arrived, const RowPart& part) {
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : travelling.recv_blocks()) {
    blocks.push_back({.from = block.arrival, .to = block.row, .count = block.count});
  }
  ops::copy_blocks(
      {.from = arrived.data(), .to = part.rows, .blocks = blocks, .row_bytes = part.row_bytes});
}

class Alltoall final : public Strategy {
 public:
  std::string_view name() const override { return "alltoall"; }

  std::unique_ptr<Path> make_device_path(const PathContext& context, Device device) const override {
    if constexpr (CROSSDOCK_HAS_CUDA) return make_alltoall_device_path(context, device);
    throw no_cuda_error();
  }

  std::shared_ptr<const void> prepare(const StrategyCall& call) override {
    if (call.plan.data().config->partial_sums == PartialSums::kNone) return nullptr;
    return std::make_shared<const RankSums>(exchange_rank_sums(call));
  }

  void scatter(const StrategyCall& call, std::span<const RowPart> parts) override {
    const ExchangedRows travelling(call.plan.data());
    for (const RowPart& part : parts) {
      Buffer packed = pack(call, travelling, part);
      const Buffer arrived = exchange_rows(call, {.send = packed,
                                                  .send_offsets = travelling.send_offsets(),
                                                  .recv_offsets = travelling.recv_offsets(),
                                                  .row_bytes = part.row_bytes});
      packed = {};
      regroup(travelling, arrived, part);
    }
  }

  void scatter_chunks(const StrategyCall& call, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Plan part(std::make_shared<const PlanData>(part_of_plan(call.plan.data(), chunks[i])),
                      nullptr);
      scatter({call.group, part, call.sequence, call.operation}, parts);
      arrived(i);
    }
  }

  void gather_sum(const StrategyCall& call, const GatherSumArgs& args) override {
    return_and_sum(call, args);
  }

  // One partial row per distinct (token, rank) comes back.
  void gather_partial_sums(const StrategyCall& call, const GatherSumArgs& args) override {
    const auto& sums = call.plan.strategy_state<RankSums>();
    const int64_t row_bytes = partial_row_bytes(call, args);
    Buffer partials = sum_at_experts(call, sums, args);
    const Buffer arrived = exchange_rows(call, {.send = partials,
                                                .send_offsets = sums.source_offsets,
                                                .recv_offsets = sums.rank_offsets,
                                                .row_bytes = row_bytes});
    partials = {};
    sum_partials(call, sums, arrived, args);
  }
};

}  // namespace

/// Packs by destination, exchanges by all-to-all-v, regroups by expert; returns in reverse. At most
/// K rows per token in each direction; with partial_sums one per (token, rank) returns.
std::unique_ptr<Strategy> make_alltoall() {
  return std::make_unique<Alltoall>();
}

}  // namespace crossdock
