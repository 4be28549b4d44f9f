#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/plan.hpp"
#include "plan/local_routes.hpp"

namespace crossdock {

/// What this rank tells the others: its T, then its kept routes to each expert, [1 + E].
std::vector<int64_t> pack_counts(const LocalRoutes& routes);

struct PlanInputs {
  std::shared_ptr<const DispatchConfig> config;
  int P = 0;
  int rank = 0;
  uint64_t id = 0;
  std::vector<std::span<const int64_t>> packed_counts;  // [P][1 + E], from every rank
};

/// Computes the whole plan from the counts of all ranks and the routes of this one. Linear in
/// T * K + P * E; exchanges nothing.
PlanData build_plan(const PlanInputs& inputs, LocalRoutes routes);

/// The plan with the routes to the experts of a chunk alone; all others count as unused. Rows stay
/// where they are. Without Segments.
PlanData part_of_plan(const PlanData& plan, const ExpertChunk& chunk);

/// Throws Error(kCapacity) if any rank would receive more than config.max_rows, or
/// Error(kInvalidArgument) if the bytes of all rows cannot be counted: the same error on all ranks,
/// as all know all counts.
void check_max_rows(const PlanData& plan);

struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};
/// The gaps between the rows of this rank that hold a token, ascending; none is empty.
std::vector<RowRange> pad_rows(const PlanData& plan);

}  // namespace crossdock
