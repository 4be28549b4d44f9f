#include "crossdock/extend/strategy_model.hpp"

namespace crossdock {
namespace {

constexpr double kOriginBytes = 24;  // token, row and weight of a route

}  // namespace

LinkFlow StrategyModel::flow(Movement movement, const RouteSums& sums,
                             const Topology& /*topology*/) const {
  if (is_scatter(movement)) return sums.routes;
  return movement == Movement::kCombine ? sums.routes.reversed() : sums.ranks.reversed();
}

double StrategyModel::memory_traffic(Movement movement, const StepSizes& n,
                                     const StrategyJob& job) const {
  const RowBytes& bytes = job.row_bytes;
  if (is_scatter(movement)) {  // pack, send; receive, unpack
    return bytes.of(movement) *
           (n.tokens + n.kept + 2 * (n.sent - n.kept) + 3 * (n.received - n.kept));
  }
  if (movement == Movement::kCombine) {  // pack, send; receive, sum
    return bytes.results * (3 * (n.received - n.kept) + 2 * (n.sent - n.kept) + n.kept + n.tokens);
  }
  return bytes.results * (n.received + n.tokens) +
         bytes.partial * (2 * n.sums_received + 2 * n.sums_sent);
}

MessageModel StrategyModel::messages(Movement movement, double /*row_bytes*/,
                                     const StrategyJob& job) const {
  return {.rounds = 1,
          .rows_per_token = movement == Movement::kPartialSums ? job.spread.reaches_rank
                                                               : job.spread.routes_to_rank};
}

// Mirrors exchange_rank_sums.
void StrategyModel::trace_plan(const StepSizes& n, const StrategyJob& job,
                               MemoryTrace& trace) const {
  if (job.config.partial_sums == PartialSums::kNone) return;
  trace.keep_in_pool(n.received * kWeightBytes);
  trace.exchange(n.sent * kOriginBytes, n.received * kOriginBytes);
  trace.keep_in_plan((n.received + 2 * n.sums_received + n.sums_sent + n.tokens) * kIndexBytes);
}

void StrategyModel::trace_rows(Movement movement, double row_bytes, const StepSizes& n,
                               const StrategyJob& /*job*/, MemoryTrace& trace) const {
  const double leaving = (n.sent - n.kept) * row_bytes;
  const double arriving = (n.received - n.kept) * row_bytes;
  if (is_scatter(movement)) return trace.exchange(leaving, arriving);
  if (movement == Movement::kCombine) return trace.exchange(arriving, leaving);
  trace.exchange(n.sums_received * row_bytes, n.sums_sent * row_bytes);
}

}  // namespace crossdock
