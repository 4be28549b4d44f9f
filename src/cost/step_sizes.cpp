#include "cost/step_sizes.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "plan/capacity.hpp"

namespace crossdock {
namespace {

// What stands around a rank.
struct Surroundings {
  double num_ranks = 0;
  double num_nodes = 0;
  double node_size = 0;     // ranks of its node
  double num_experts = 0;   // of its own
  double node_experts = 0;  // of its node
};

Surroundings look_around(const CostInputs& inputs, const Placement& placement, size_t rank) {
  const std::vector<int>& node_of = inputs.topology.node_of_rank;
  Surroundings around{.num_ranks = static_cast<double>(node_of.size()),
                      .num_nodes = static_cast<double>(inputs.topology.num_nodes)};
  for (size_t r = 0; r < node_of.size(); ++r) {
    if (node_of[r] != node_of[rank]) continue;
    const auto experts =
        static_cast<double>(placement.owner_offsets[r + 1] - placement.owner_offsets[r]);
    around.node_size += 1.0;
    around.node_experts += experts;
    if (r == rank) around.num_experts = experts;
  }
  return around;
}

}  // namespace

RowBytes row_bytes_of(const CostInputs& inputs) {
  const auto D = static_cast<double>(inputs.config.width);
  const bool is_fp8 = inputs.dtype == DType::kF8E4M3;
  const DType result = is_fp8 ? DType::kBF16 : inputs.dtype;
  const DType partial = inputs.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  constexpr double kScaled = 128;  // values per fp32 scale
  const double num_scales = std::ceil(D / kScaled);
  return {.tokens = D * static_cast<double>(size_of(inputs.dtype)),
          .scales = is_fp8 ? 4.0 * num_scales : 0.0,
          .results = D * static_cast<double>(size_of(result)),
          .partial = D * static_cast<double>(size_of(partial))};
}

double tokens_per_round(const CostInputs& inputs, const RelayLoad& load, double row_bytes) {
  const MpiOptions& engine = inputs.engine;
  const auto staging = static_cast<double>(
      std::min(inputs.staging_bytes, engine.max_in_flight / 2 * engine.chunk_bytes));
  const auto K = static_cast<double>(inputs.config.top_k);
  const auto rows_at_once = [&](double bytes) {
    return std::max(1.0, std::floor(staging / std::max(1.0, bytes)));
  };
  const auto tokens_at_once = [&](double bytes) {
    return std::max(1.0, std::floor(rows_at_once(bytes) / K));
  };
  const double widest_row = static_cast<double>(inputs.config.width) * 8;
  double stretch = tokens_at_once(widest_row);
  while (stretch > 1 && stretch * load.routes > rows_at_once(widest_row)) {
    stretch = std::floor(stretch / 2);
  }
  double stretches = std::numeric_limits<double>::infinity();
  if (load.are_sums) stretches = std::floor(tokens_at_once(row_bytes) / stretch);
  if (load.travelling > 0) {
    stretches =
        std::min(stretches, std::floor(rows_at_once(row_bytes) / (stretch * load.travelling)));
  }
  return stretch * std::max(1.0, stretches);
}

StepSizes expected_sizes(const RouteSums& sums, const CostInputs& inputs,
                         const Placement& placement, StrategyKind kind, size_t rank) {
  const auto experts =
      static_cast<double>(placement.owner_offsets[rank + 1] - placement.owner_offsets[rank]);
  StepSizes sizes{
      .tokens = sums.tokens[rank],
      .all_tokens = std::accumulate(sums.tokens.begin(), sums.tokens.end(), 0.0),
      .sent = sums.routes.total_sent(rank),
      .received = sums.routes.total_received(rank),
      .kept = sums.routes.kept[rank],
      .far_sent = sums.routes.sent_between[rank],
      .far_received = sums.routes.received_between[rank],
      .sums_sent = sums.ranks.total_sent(rank),
      .sums_received = sums.ranks.total_received(rank),
  };
  sizes.padded = sizes.received + experts * static_cast<double>(inputs.config.alignment - 1) / 2.0;
  if (kind == StrategyKind::kHierarchical) {
    sizes.near_sums = sums.reach_own_node[rank];
    sizes.copies_sent = sums.nodes.sent_between[rank];
    sizes.copies_received = sums.nodes.received_between[rank];
    sizes.targets_received = sums.nodes.kept[rank] + sums.nodes.sent_within[rank];
  } else {
    sizes.near_sums = sums.ranks.kept[rank] + sums.ranks.sent_within[rank];
    sizes.copies_sent = sums.ranks.sent_between[rank];
    sizes.copies_received = sums.ranks.received_between[rank];
    sizes.targets_received = sizes.far_received;
  }
  return sizes;
}

StepSizes worst_sizes(const CostInputs& inputs, const Placement& placement, StrategyKind kind,
                      size_t rank) {
  const Surroundings around = look_around(inputs, placement, rank);
  const auto T = static_cast<double>(inputs.tokens);
  const auto K = static_cast<double>(inputs.config.top_k);
  const auto E = static_cast<double>(inputs.config.num_experts);
  const double here = std::min(K, around.num_experts);  // routes of a token to this rank
  const double elsewhere = K - here;                    // its other routes, on other nodes if any
  const double far_tokens = T * (around.num_ranks - around.node_size);
  const double some = here > 0 ? 1.0 : 0.0;
  const bool by_node = kind == StrategyKind::kHierarchical;
  const double far_places = by_node ? around.num_nodes - 1.0 : around.num_ranks - around.node_size;
  StepSizes sizes{
      .tokens = T,
      .all_tokens = T * around.num_ranks,
      .sent = T * K,
      .received = T * around.num_ranks * here,
      .kept = T * here,
      .far_sent = T * std::min(elsewhere, E - around.node_experts),
      .far_received = far_tokens * here,
      .sums_sent = T * (some + std::min(elsewhere, around.num_ranks - 1.0)),
      .sums_received = T * around.num_ranks * some,
      .near_sums = T * (by_node ? 1.0 : some + std::min(elsewhere, around.node_size - 1)),
      .copies_sent = T * std::min(elsewhere, far_places),
      .copies_received = far_tokens * some,
      .targets_received = far_tokens * here};
  if (by_node) {
    const double sources = sources_of_gateways(inputs.topology)[rank];
    sizes.copies_received = T * sources;
    sizes.targets_received = T * sources * std::min(K, around.node_experts);
  }
  sizes.padded =
      sizes.received + around.num_experts * static_cast<double>(inputs.config.alignment - 1);
  return sizes;
}

StepSizes limited_sizes(const CostInputs& inputs, const Placement& placement, StrategyKind kind,
                        size_t rank) {
  StepSizes sizes = worst_sizes(inputs, placement, kind, rank);
  const Surroundings around = look_around(inputs, placement, rank);
  const DispatchConfig& config = inputs.config;
  const double pads = sizes.padded - sizes.received;
  double most = config.max_rows ? static_cast<double>(*config.max_rows) : sizes.received;
  if (config.capacity) {
    const auto C = static_cast<double>(
        std::min(capacity_rows(config, inputs.tokens), inputs.tokens));  // per source and expert
    const double local = C * around.num_experts;
    most = std::min(most, around.num_ranks * local);
    sizes.kept = std::min(sizes.kept, local);
    sizes.far_received =
        std::min(sizes.far_received, (around.num_ranks - around.node_size) * local);
    const double via_node =
        (around.num_ranks - around.node_size) * C * around.node_experts;  // through any gateway
    sizes.targets_received = std::min(sizes.targets_received, via_node);
  }
  sizes.received = std::min(sizes.received, most);
  sizes.sums_received = std::min(sizes.sums_received, sizes.received);
  sizes.far_received = std::min(sizes.far_received, sizes.received);
  sizes.kept = std::min(sizes.kept, sizes.received);
  sizes.copies_received = std::min(sizes.copies_received, sizes.targets_received);
  const auto padded_source = static_cast<double>(padded_rows_per_source(config));
  sizes.padded = padded_source > 0 ? around.num_ranks * padded_source * around.num_experts
                                   : sizes.received + pads;
  return sizes;
}

}  // namespace crossdock
