#include <algorithm>
#include <cmath>
#include <limits>

#include "dispatch/strategies/direct/direct.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock {
namespace {

constexpr double kTargetBytes = sizeof(RelayTarget);
constexpr double kCopyBytes = 16;  // header of a copy in a manifest, or size entry of a manifest

// Rows that a rank sends or receives between nodes, whichever is more.
struct RelayLoad {
  double routes = 0;
  double sent = 0;  // in the current operation: copies or routes
  bool are_sums = false;
};

// Tokens per rank that one round serves (RelayRound), given the load of one token.
double tokens_per_round(const StrategyJob& job, const RelayLoad& load, double row_bytes) {
  const auto K = static_cast<double>(job.config.top_k);
  const auto max_rows_in_flight = [&](double bytes) {
    return std::max(1.0, std::floor(job.staging_bytes / std::max(1.0, bytes)));
  };
  const auto max_tokens_in_flight = [&](double bytes) {
    return std::max(1.0, std::floor(max_rows_in_flight(bytes) / K));
  };
  const double widest_row = static_cast<double>(job.config.width) * 8;
  double range = max_tokens_in_flight(widest_row);
  while (range > 1 && range * load.routes > max_rows_in_flight(widest_row)) {
    range = std::floor(range / 2);
  }
  double ranges = std::numeric_limits<double>::infinity();
  if (load.are_sums) ranges = std::floor(max_tokens_in_flight(row_bytes) / range);
  if (load.sent > 0) {
    ranges = std::min(ranges, std::floor(max_rows_in_flight(row_bytes) / (range * load.sent)));
  }
  return range * std::max(1.0, ranges);
}

// Share of all tokens that one round serves, given the load of all tokens.
double share_of_round(const StrategyJob& job, RelayLoad load, double row_bytes, double tokens) {
  if (tokens <= 0) return 1.0;
  load.routes /= tokens;
  load.sent /= tokens;
  return std::min(1.0, tokens_per_round(job, load, row_bytes) / tokens);
}

}  // namespace

LinkFlow flow_with_copies(const LinkFlow& routes, const LinkFlow& copies) {
  LinkFlow flow = routes;
  flow.sent_between = copies.sent_between;
  flow.received_between = copies.received_between;
  return flow;
}

double RelayModel::memory_traffic(Movement movement, const StepSizes& n,
                                  const StrategyJob& job) const {
  const RowBytes& bytes = job.row_bytes;
  const CopySizes& far = copies(n);
  const bool relays = job.has_far_ranks();
  if (is_scatter(movement)) {
    const double relayed = relays ? 3 * far.sent + 2 * far.received : 0.0;
    return bytes.of(movement) * (n.tokens + n.received + relayed);
  }
  if (movement == Movement::kCombine) {
    const double relayed = relays ? 2 * far.targets_received + 2 * n.far_sent : 0.0;
    return bytes.results * (n.received + relayed + n.tokens);
  }
  const double relayed = relays ? 2 * far.received + 2 * far.sent : 0.0;
  return bytes.results * (n.received + n.tokens) + bytes.partial * (2 * far.near_sums + relayed);
}

MessageModel RelayModel::messages(Movement movement, double row_bytes,
                                  const StrategyJob& job) const {
  if (!job.has_far_ranks()) return {.rounds = 0};
  const double rows = flow(movement, job.sums, job.topology).most_between();
  const RelayLoad load{.routes = 0,  // evenly spread
                       .sent = rows / std::max(1.0, job.tokens),
                       .are_sums = movement == Movement::kPartialSums};
  const double rounds = std::ceil(job.tokens / tokens_per_round(job, load, row_bytes));
  return {.rounds = std::max(1.0, rounds), .rows_per_token = rows_per_token(movement, job)};
}

// Mirrors make_relay and make_source_partials.
void RelayModel::trace_plan(const StepSizes& n, const StrategyJob& job, MemoryTrace& trace) const {
  const CopySizes& far = copies(n);
  if (job.has_far_ranks()) {
    const double P = job.num_ranks();
    trace.agree();
    trace.exchange(P * kCopyBytes, P * kCopyBytes);  // sizes of the manifests
    trace.exchange(far.sent * kCopyBytes + n.far_sent * kTargetBytes,
                   far.received * kCopyBytes + far.targets_received * kTargetBytes);
    trace.keep_in_plan((2 * far.sent + n.far_sent + 2 * far.received) * kIndexBytes +
                       far.targets_received * kTargetBytes);
  }
  if (job.config.partial_sums != PartialSums::kNone) {
    trace.keep_in_plan((n.sent - n.far_sent + 2 * far.near_sums + far.sent + n.tokens) *
                       kIndexBytes);
  }
}

void RelayModel::trace_rows(Movement movement, double row_bytes, const StepSizes& n,
                            const StrategyJob& job, MemoryTrace& trace) const {
  const CopySizes& far = copies(n);
  RelayLoad load{.routes = std::max(n.far_sent, far.targets_received),
                 .sent = std::max(far.sent, far.received),
                 .are_sums = movement == Movement::kPartialSums};
  if (movement == Movement::kCombine) load.sent = load.routes;
  const double share = share_of_round(job, load, row_bytes, n.tokens);
  if (movement == Movement::kPartialSums) {
    MemoryTrace::Lease sums = trace.take_scratch(far.received * share * row_bytes);
    const MemoryTrace::Lease returned = trace.take_scratch(far.sent * share * row_bytes);
    sums.end();
    const MemoryTrace::Lease weights =
        trace.take_scratch((n.sent - n.far_sent) * share * kWeightBytes);
    const MemoryTrace::Lease near = trace.take_scratch(far.near_sums * share * row_bytes);
    return;
  }
  if (!job.has_far_ranks()) return;
  const double round_row = row_bytes * share;
  if (is_scatter(movement)) {
    trace.exchange(far.sent * round_row, far.received * round_row);
  } else {
    trace.exchange(far.targets_received * round_row, n.far_sent * round_row);
  }
}

}  // namespace crossdock
