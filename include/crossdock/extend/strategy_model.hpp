#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/plan.hpp"

namespace crossdock {

/// Movements of rows in one step. kGradients is like kDispatch, in the dtype of the results.
enum class Movement : uint8_t { kDispatch, kGradients, kCombine, kPartialSums };

/// Whether rows go from tokens to experts (Strategy::scatter), not back.
constexpr bool is_scatter(Movement movement) {
  return movement == Movement::kDispatch || movement == Movement::kGradients;
}

/// Rows that each rank keeps, sends and receives, [P] each.
struct CROSSDOCK_API LinkFlow {
  std::vector<double> kept;  // rows that stay on their rank
  std::vector<double> sent_within;
  std::vector<double> sent_between;
  std::vector<double> received_within;
  std::vector<double> received_between;

  explicit LinkFlow(size_t num_ranks = 0);
  void add(const Topology& topology, int from, int to, double rows);
  /// The same rows in the opposite direction.
  LinkFlow reversed() const;
  /// All rows that a rank sends or receives, including those it keeps.
  double total_sent(size_t rank) const;
  double total_received(size_t rank) const;
  /// Maximum number of rows that any rank sends or receives.
  double most_within() const;
  double most_between() const;
};

/// Totals over the routes of all ranks, either counted from a plan or expected before there is one.
struct RouteSums {
  std::vector<double> tokens;          // [P] T of every rank
  std::vector<double> reach_own_node;  // [P] tokens of a rank with a route to its own node
  LinkFlow routes;                     // one row per route
  LinkFlow ranks;                      // one row per token and rank it has a route to
  /// One row per token and other node it has a route to (between), and the rows that its gateways
  /// there forward, one per route (within; kept: to themselves). Excludes routes within a node.
  LinkFlow nodes;
};

/// Expected destinations of one token's K distinct experts.
struct TokenSpread {
  std::vector<double> routes_to_rank;  // [P] number of routes
  std::vector<double> reaches_rank;    // [P] probability of at least one route
  std::vector<double> reaches_node;    // [nodes] the same
};

/// Bytes of one row.
struct RowBytes {
  double tokens = 0;   // a dispatched token
  double scales = 0;   // its scales, with fp8
  double results = 0;  // an expert's result, or a gradient
  double partial = 0;  // a partial sum

  double of(Movement movement) const {
    if (movement == Movement::kDispatch) return tokens + scales;
    return movement == Movement::kPartialSums ? partial : results;
  }
};

/// Copies of tokens that go to other nodes.
struct CopySizes {
  double near_sums = 0;         // partial sums of rows on the rank's own node
  double sent = 0;              // copies that leave this rank
  double received = 0;          // copies that arrive
  double targets_received = 0;  // routes that the received copies serve
};

/// Row counts of one rank in one step.
struct StepSizes {
  double tokens = 0;         // T
  double all_tokens = 0;     // of all ranks
  double sent = 0;           // S
  double received = 0;       // R without pad rows
  double padded = 0;         // R
  double kept = 0;           // routes of its own tokens to its own experts
  double far_sent = 0;       // part of sent: to other nodes
  double far_received = 0;   // part of received: from other nodes
  double sums_sent = 0;      // partial sums returned to it: one per own token and rank it reaches
  double sums_received = 0;  // partial sums it makes: one per token with a route to it
  CopySizes per_rank{};      // with one copy per token and far rank
  CopySizes per_node{};      // with one copy per token and far node, sent to a gateway there
};

/// The job that a model describes. All ranks have the same number of tokens.
struct StrategyJob {
  const DispatchConfig& config;
  const Topology& topology;
  double tokens = 0;  // T of every rank
  RowBytes row_bytes{};
  double staging_bytes = 0;   // limit on rows in flight, if a strategy works in rounds
  const TokenSpread& spread;  // expected for one token
  const RouteSums& sums;      // expected for all ranks

  bool has_far_ranks() const { return topology.num_nodes > 1; }
  double num_ranks() const { return static_cast<double>(topology.node_of_rank.size()); }
};

/// How a movement uses the communicator.
struct MessageModel {
  double rounds = 1;                     // exchanges; 0: the communicator is not used
  std::vector<double> rows_per_token{};  // [P] sent to each rank, or [nodes] to each node
};

/// Records the memory requests and exchanges of a strategy, in the order of its code. The planner
/// replays them against the rules of the memory pools.
class CROSSDOCK_API MemoryTrace {
 public:
  /// Memory in use; returned at the end of its scope or earlier by end().
  class [[nodiscard]] Lease {
   public:
    explicit Lease(std::function<void()> give_back) : give_back_(std::move(give_back)) {}
    ~Lease() { end(); }
    Lease(Lease&& other) noexcept : give_back_(std::exchange(other.give_back_, nullptr)) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Lease& operator=(Lease&&) = delete;
    void end() {
      if (give_back_) std::exchange(give_back_, nullptr)();
    }

   private:
    std::function<void()> give_back_;
  };

  virtual ~MemoryTrace() = default;

  /// BufferPool::take_scratch.
  virtual Lease take_scratch(double num_bytes) = 0;
  /// Group::agree without a body.
  virtual void agree() = 0;
  /// One exchange, with scratch memory for what is sent and what is received.
  void exchange(double sent_bytes, double received_bytes) {
    const Lease sent = take_scratch(sent_bytes);
    const Lease received = take_scratch(received_bytes);
  }
  /// Memory that the result of Strategy::prepare keeps for the whole step, from the group's pool or
  /// elsewhere (vectors). For trace_plan only.
  virtual void keep_in_pool(double num_bytes) = 0;
  virtual void keep_in_plan(double num_bytes) = 0;
};

inline constexpr double kIndexBytes = 8;   // a row number
inline constexpr double kWeightBytes = 4;  // a route's weight: fp32

/// Describes what a strategy sends and what it holds, before a job starts. The planner and "auto"
/// compare strategies by their models alone (Strategy::model). All members are optional: the
/// defaults describe a strategy that packs rows per destination, exchanges them and unpacks them,
/// as alltoall does. Results must depend on the arguments only and be identical on every rank.
/// Members may be called by several threads at once.
class CROSSDOCK_API StrategyModel {
 public:
  virtual ~StrategyModel() = default;

  /// Whether ranks of a node load from and store into each other's memory. Rows are then allocated
  /// in the group's windows, and only rows between nodes pass through the communicator.
  virtual bool reaches_peers() const { return false; }

  /// The rows that each rank sends and receives, one entry per rank in each vector.
  virtual LinkFlow flow(Movement movement, const RouteSums& sums, const Topology& topology) const;

  /// Whether GPUs of one node exchange one row per token and rank in this movement instead of the
  /// rows of `flow`: the receiver copies it to the token's other rows, or the owner of the rows
  /// sums them first.
  virtual bool joins_rows(Movement /*movement*/) const { return false; }

  /// Bytes that a rank's memory reads and writes, including peers' loads and stores.
  virtual double memory_traffic(Movement movement, const StepSizes& sizes,
                                const StrategyJob& job) const;

  /// The exchanges in which rows of `row_bytes` bytes are sent.
  virtual MessageModel messages(Movement movement, double row_bytes, const StrategyJob& job) const;

  /// Makes the requests of Strategy::prepare.
  virtual void trace_plan(const StepSizes& sizes, const StrategyJob& job, MemoryTrace& trace) const;

  /// Makes the requests of scatter (is_scatter), gather_sum (kCombine) or gather_partial_sums
  /// (kPartialSums) for rows of `row_bytes` bytes.
  virtual void trace_rows(Movement movement, double row_bytes, const StepSizes& sizes,
                          const StrategyJob& job, MemoryTrace& trace) const;

  /// The name of a strategy that behaves like this one on this topology; empty: none. If that
  /// strategy is chosen, this one is not named as an alternative.
  virtual std::string_view same_as(const Topology& /*topology*/) const { return {}; }
};

}  // namespace crossdock
