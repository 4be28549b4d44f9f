#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/plan.hpp"
#include "plan/local_routes.hpp"

namespace crossdock {

/// This rank's T, its K and its number of kept routes to each expert, [2 + E], for the other ranks.
std::vector<int64_t> pack_counts(const LocalRoutes& routes);

struct PlanInputs {
  std::shared_ptr<const DispatchConfig> config;
  int P = 0;
  int rank = 0;
  uint64_t id = 0;
  std::vector<std::span<const int64_t>> packed_counts;  // [P][2 + E], of all ranks
};

/// The K of the plan: the largest of any rank.
int64_t agreed_slots(const PlanInputs& inputs);

/// Computes the plan from the counts of all ranks and the routes of this one. Takes time linear in
/// T * K + P * E. Not collective. REQUIRES: routes.K == agreed_slots(inputs).
PlanData build_plan(const PlanInputs& inputs, LocalRoutes routes);

/// The plan restricted to routes to the experts of a chunk; all other routes count as unused. Rows
/// keep their places. Segments are left empty.
PlanData part_of_plan(const PlanData& plan, const ExpertChunk& chunk);

/// Throws Error(kCapacity) if any rank would receive more than config.max_rows, or
/// Error(kInvalidArgument) if the bytes of all rows overflow: the same error on every rank, because
/// all ranks know all counts.
void check_max_rows(const PlanData& plan);

struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};
/// The pad rows of this rank, as ascending, non-empty ranges.
std::vector<RowRange> pad_rows(const PlanData& plan);

/// Throws Error(kInvalidArgument) if the configuration is invalid for this number of ranks.
void check_config(const DispatchConfig& config, int num_ranks);

/// Whether the bytes of this many rows (the product of num_rows) fit in int64 for any dtype.
bool row_bytes_fit_int64(std::initializer_list<int64_t> num_rows, const DispatchConfig& config);

/// The configuration as "key=value;key=value", for Proposal::config. Without candidates their key
/// is omitted.
std::string config_text(const DispatchConfig& config, std::string_view strategy_name,
                        std::string_view candidates = {});

}  // namespace crossdock
