#include "cost/step_sizes.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cost/route_sums.hpp"
#include "plan/capacity.hpp"

namespace crossdock {
namespace {

// A rank's place among the ranks and experts.
struct Neighborhood {
  double num_ranks = 0;
  double num_nodes = 0;
  double node_size = 0;     // ranks of its node
  double num_experts = 0;   // on this rank
  double node_experts = 0;  // on its node
};

Neighborhood neighborhood_of(const CostInputs& inputs, const Placement& placement, size_t rank) {
  const std::vector<int>& node_of = inputs.topology.node_of_rank;
  Neighborhood around{.num_ranks = static_cast<double>(node_of.size()),
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

// Expected pad rows of an expert: half an alignment, or a whole one if it has no rows and is kept.
double expected_pads(const DispatchConfig& config, double mean_rows) {
  const auto alignment = static_cast<double>(config.alignment);
  const double half = (alignment - 1) / 2.0;
  if (!config.keep_empty_segments) return half;
  const double odds_of_none = std::exp(-mean_rows);  // Poisson
  return half + odds_of_none * (alignment - half);
}

double most_pads(const DispatchConfig& config) {
  return static_cast<double>(config.keep_empty_segments ? config.alignment : config.alignment - 1);
}

}  // namespace

RowBytes row_bytes_of(const CostInputs& inputs) {
  const auto D = static_cast<double>(inputs.config.width);
  const bool is_fp8 = inputs.dtype == DType::kF8E4M3;
  const DType result = is_fp8 ? DType::kBF16 : inputs.dtype;
  const DType partial = partial_dtype(inputs.config.partial_sums, result);
  constexpr double kScaled = 128;  // values per fp32 scale
  const double num_scales = std::ceil(D / kScaled);
  return {.tokens = D * static_cast<double>(size_of(inputs.dtype)),
          .scales = is_fp8 ? 4.0 * num_scales : 0.0,
          .results = D * static_cast<double>(size_of(result)),
          .partial = D * static_cast<double>(size_of(partial))};
}

StepSizes expected_sizes(const RouteSums& sums, const CostInputs& inputs,
                         const Placement& placement, size_t rank) {
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
  const double mean_rows = experts > 0 ? sizes.received / experts : 0.0;
  sizes.padded = sizes.received + experts * expected_pads(inputs.config, mean_rows);
  sizes.per_rank = {.near_sums = sums.ranks.kept[rank] + sums.ranks.sent_within[rank],
                    .sent = sums.ranks.sent_between[rank],
                    .received = sums.ranks.received_between[rank],
                    .targets_received = sizes.far_received};
  sizes.per_node = {.near_sums = sums.reach_own_node[rank],
                    .sent = sums.nodes.sent_between[rank],
                    .received = sums.nodes.received_between[rank],
                    .targets_received = sums.nodes.kept[rank] + sums.nodes.sent_within[rank]};
  return sizes;
}

StepSizes worst_sizes(const CostInputs& inputs, const Placement& placement, size_t rank) {
  const Neighborhood around = neighborhood_of(inputs, placement, rank);
  const auto T = static_cast<double>(inputs.tokens);
  const auto K = static_cast<double>(inputs.config.top_k);
  const auto E = static_cast<double>(inputs.config.num_experts);
  const double here = std::min(K, around.num_experts);  // routes of a token to this rank
  const double elsewhere = K - here;                    // its other routes, on other nodes if any
  const double far_ranks = around.num_ranks - around.node_size;
  const double far_tokens = T * far_ranks;
  const double some = here > 0 ? 1.0 : 0.0;
  const double sources = sources_of_gateways(inputs.topology)[rank];
  StepSizes sizes{.tokens = T,
                  .all_tokens = T * around.num_ranks,
                  .sent = T * K,
                  .received = T * around.num_ranks * here,
                  .kept = T * here,
                  .far_sent = T * std::min(elsewhere, E - around.node_experts),
                  .far_received = far_tokens * here,
                  .sums_sent = T * (some + std::min(elsewhere, around.num_ranks - 1.0)),
                  .sums_received = T * around.num_ranks * some,
                  .per_rank = {.near_sums = T * (some + std::min(elsewhere, around.node_size - 1)),
                               .sent = T * std::min(elsewhere, far_ranks),
                               .received = far_tokens * some,
                               .targets_received = far_tokens * here},
                  .per_node = {.near_sums = T,
                               .sent = T * std::min(elsewhere, around.num_nodes - 1.0),
                               .received = T * sources,
                               .targets_received = T * sources * std::min(K, around.node_experts)}};
  sizes.padded = sizes.received + around.num_experts * most_pads(inputs.config);
  return sizes;
}

StepSizes limited_sizes(const CostInputs& inputs, const Placement& placement, size_t rank) {
  StepSizes sizes = worst_sizes(inputs, placement, rank);
  const Neighborhood around = neighborhood_of(inputs, placement, rank);
  const DispatchConfig& config = inputs.config;
  const double pads = sizes.padded - sizes.received;
  double most = config.max_rows ? static_cast<double>(*config.max_rows) : sizes.received;
  if (config.capacity) {
    const auto C = static_cast<double>(
        std::min(capacity_rows(config, inputs.tokens), inputs.tokens));  // per source and expert
    const double local = C * around.num_experts;
    const double far_ranks = around.num_ranks - around.node_size;
    most = std::min(most, around.num_ranks * local);
    sizes.kept = std::min(sizes.kept, local);
    sizes.far_received = std::min(sizes.far_received, far_ranks * local);
    for (CopySizes* copies : {&sizes.per_rank, &sizes.per_node}) {
      const double via_node = far_ranks * C * around.node_experts;  // through any gateway
      copies->targets_received = std::min(copies->targets_received, via_node);
    }
  }
  sizes.received = std::min(sizes.received, most);
  sizes.sums_received = std::min(sizes.sums_received, sizes.received);
  sizes.far_received = std::min(sizes.far_received, sizes.received);
  sizes.kept = std::min(sizes.kept, sizes.received);
  for (CopySizes* copies : {&sizes.per_rank, &sizes.per_node}) {
    copies->received = std::min(copies->received, copies->targets_received);
  }
  const auto padded_source = static_cast<double>(padded_rows_per_source(config));
  sizes.padded = padded_source > 0 ? around.num_ranks * padded_source * around.num_experts
                                   : sizes.received + pads;
  return sizes;
}

}  // namespace crossdock
