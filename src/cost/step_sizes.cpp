#include "cost/step_sizes.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "core/block_ledger.hpp"
#include "core/tensor_memory.hpp"
#include "plan/local_routes.hpp"
#include "plan/placement.hpp"

namespace crossdock {
namespace {

// sum - part, or 0 if rounding makes it negative.
double difference(double sum, double part) {
  return std::max(0.0, sum - part);
}

double most(const std::vector<double>& a, const std::vector<double>& b) {
  return std::max(*std::max_element(a.begin(), a.end()), *std::max_element(b.begin(), b.end()));
}

struct NodeMap {
  std::vector<int64_t> node_sizes;  // [nodes]
  std::vector<int64_t> places;      // [P] index of a rank on its node

  explicit NodeMap(const Topology& topology)
      : node_sizes(index(topology.num_nodes), 0), places(topology.node_of_rank.size()) {
    for (size_t rank = 0; rank < places.size(); ++rank) {
      places[rank] = node_sizes[index(topology.node_of_rank[rank])]++;
    }
  }
};

// Every rank sends `rows_to_rank` [P].
LinkFlow flow_from_equal_sources(const std::vector<double>& rows_to_rank, const Topology& topology,
                                 const NodeMap& nodes) {
  const size_t P = rows_to_rank.size();
  std::vector<double> rows_to_node(nodes.node_sizes.size(), 0.0);
  for (size_t rank = 0; rank < P; ++rank) {
    rows_to_node[index(topology.node_of_rank[rank])] += rows_to_rank[rank];
  }
  const double all = std::accumulate(rows_to_node.begin(), rows_to_node.end(), 0.0);
  LinkFlow flow(P);
  for (size_t rank = 0; rank < P; ++rank) {
    const size_t node = index(topology.node_of_rank[rank]);
    const auto node_size = static_cast<double>(nodes.node_sizes[node]);
    flow.kept[rank] = rows_to_rank[rank];
    flow.sent_within[rank] = difference(rows_to_node[node], rows_to_rank[rank]);
    flow.sent_between[rank] = difference(all, rows_to_node[node]);
    flow.received_within[rank] = (node_size - 1.0) * rows_to_rank[rank];
    flow.received_between[rank] = (static_cast<double>(P) - node_size) * rows_to_rank[rank];
  }
  return flow;
}

std::vector<double> scaled(std::vector<double> values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

// Adds the routes of one token to the sums; `owners` are the ranks of its experts.
void count_token(RouteSums& sums, const Topology& topology, const Gateway& gateway, int source,
                 std::vector<int>& owners) {
  const int own_node = topology.node_of_rank[index(source)];
  std::vector<int> reached_nodes;
  bool reaches_own_node = false;
  for (const int owner : owners) {
    sums.routes.add(topology, source, owner, 1.0);
    const int node = topology.node_of_rank[index(owner)];
    reaches_own_node = reaches_own_node || node == own_node;
    if (node == own_node) continue;
    const int via = gateway(source, owner);
    if (std::find(reached_nodes.begin(), reached_nodes.end(), node) == reached_nodes.end()) {
      sums.nodes.add(topology, source, via, 1.0);
      reached_nodes.push_back(node);
    }
    sums.nodes.add(topology, via, owner, 1.0);
  }
  std::sort(owners.begin(), owners.end());
  owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
  for (const int owner : owners) sums.ranks.add(topology, source, owner, 1.0);
  if (reaches_own_node) sums.reach_own_node[index(source)] += 1.0;
}

}  // namespace

LinkFlow::LinkFlow(size_t num_ranks)
    : kept(num_ranks, 0.0),
      sent_within(num_ranks, 0.0),
      sent_between(num_ranks, 0.0),
      received_within(num_ranks, 0.0),
      received_between(num_ranks, 0.0) {}

void LinkFlow::add(const Topology& topology, int from, int to, double rows) {
  const size_t f = index(from);
  const size_t t = index(to);
  if (f == t) {
    kept[f] += rows;
  } else if (topology.node_of_rank[f] == topology.node_of_rank[t]) {
    sent_within[f] += rows;
    received_within[t] += rows;
  } else {
    sent_between[f] += rows;
    received_between[t] += rows;
  }
}

LinkFlow LinkFlow::reversed() const {
  LinkFlow flow = *this;
  std::swap(flow.sent_within, flow.received_within);
  std::swap(flow.sent_between, flow.received_between);
  return flow;
}

double LinkFlow::total_sent(size_t rank) const {
  return kept[rank] + sent_within[rank] + sent_between[rank];
}

double LinkFlow::total_received(size_t rank) const {
  return kept[rank] + received_within[rank] + received_between[rank];
}

double LinkFlow::most_within() const {
  return most(sent_within, received_within);
}

double LinkFlow::most_between() const {
  return most(sent_between, received_between);
}

std::vector<double> sources_of_gateways(const Topology& topology) {
  const NodeMap nodes(topology);
  std::map<int64_t, int64_t> nodes_of_size;
  for (const int64_t size : nodes.node_sizes) ++nodes_of_size[size];
  std::vector<double> sources(nodes.places.size(), 0.0);
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    const int64_t own_size = nodes.node_sizes[index(topology.node_of_rank[rank])];
    for (const auto& [size, num_nodes] : nodes_of_size) {
      const int64_t other_nodes = num_nodes - (size == own_size ? 1 : 0);
      // Places p < size with p % own_size == place of this rank.
      const int64_t matching = (size - nodes.places[rank] + own_size - 1) / own_size;
      sources[rank] += static_cast<double>(other_nodes * std::max<int64_t>(matching, 0));
    }
  }
  return sources;
}

RouteSums expected_sums(const TokenSpread& spread, const Topology& topology, int64_t tokens) {
  const auto T = static_cast<double>(tokens);
  const size_t P = spread.routes_to_rank.size();
  const NodeMap nodes(topology);
  RouteSums sums;
  sums.tokens.assign(P, T);
  sums.routes = flow_from_equal_sources(scaled(spread.routes_to_rank, T), topology, nodes);
  sums.ranks = flow_from_equal_sources(scaled(spread.reaches_rank, T), topology, nodes);

  const double all_nodes =
      std::accumulate(spread.reaches_node.begin(), spread.reaches_node.end(), 0.0);
  const std::vector<double> sources = sources_of_gateways(topology);
  sums.nodes = LinkFlow(P);
  for (size_t rank = 0; rank < P; ++rank) {
    const size_t node = index(topology.node_of_rank[rank]);
    const auto far_sources = static_cast<double>(P) - static_cast<double>(nodes.node_sizes[node]);
    const double routes_here = T * spread.routes_to_rank[rank];
    const double routes_to_node = sums.routes.kept[rank] + sums.routes.sent_within[rank];
    sums.reach_own_node.push_back(T * spread.reaches_node[node]);
    sums.nodes.sent_between[rank] = T * difference(all_nodes, spread.reaches_node[node]);
    sums.nodes.received_between[rank] = T * sources[rank] * spread.reaches_node[node];
    sums.nodes.kept[rank] = sources[rank] * routes_here;
    sums.nodes.sent_within[rank] = sources[rank] * difference(routes_to_node, routes_here);
    sums.nodes.received_within[rank] = (far_sources - sources[rank]) * routes_here;
  }
  return sums;
}

RouteSums counted_sums(std::span<const CountedRoutes> ranks, std::span<const int32_t> owner,
                       const Topology& topology) {
  const size_t P = ranks.size();
  RouteSums sums{.tokens = {},
                 .reach_own_node = std::vector<double>(P, 0.0),
                 .routes = LinkFlow(P),
                 .ranks = LinkFlow(P),
                 .nodes = LinkFlow(P)};
  const Gateway gateway = gateway_per_node(topology);
  std::vector<int> owners;
  for (size_t source = 0; source < P; ++source) {
    const CountedRoutes& routes = ranks[source];
    const size_t K = index(routes.top_k);
    const size_t T = routes.expert_ids.size() / K;
    sums.tokens.push_back(static_cast<double>(T));
    for (size_t first = 0; first < routes.expert_ids.size(); first += K) {
      owners.clear();
      for (const int32_t e : routes.expert_ids.subspan(first, K)) {
        if (e >= 0) owners.push_back(owner[index(e)]);
      }
      count_token(sums, topology, gateway, static_cast<int>(source), owners);
    }
  }
  return sums;
}

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

namespace {

constexpr double kPageBytes = 4096;
constexpr double kHeaderBytes = 72;  // of an agreement

// Models the windows: a request gets the smallest free block that is large enough, unless more than
// half of it would be wasted; otherwise a new block, which replaces a free one at least half as
// large.
class WindowModel {
 public:
  double take(double num_bytes) {
    if (num_bytes <= 0) return 0;
    const double wanted = std::ceil(num_bytes / kPageBytes) * kPageBytes;
    const auto found = free_.lower_bound(wanted);
    if (found == free_.end() || *found > 2 * wanted) {
      if (found != free_.begin() && 2 * *std::prev(found) >= wanted) {
        held_ -= *std::prev(found);
        free_.erase(std::prev(found));
      }
      held_ += wanted;
      return wanted;
    }
    const double block = *found;
    free_.erase(found);
    return block;
  }
  void give_back(double block) {
    if (block > 0) free_.insert(block);
  }
  double held() const { return held_; }

 private:
  std::multiset<double> free_;
  double held_ = 0;
};

// Models the pool.
class PoolModel {
 public:
  /// No request exceeds `largest` bytes. The ledger counts in bytes or, if a few times `largest`
  /// would overflow, in larger units.
  explicit PoolModel(double largest)
      : unit_(std::exp2(std::max(0.0, std::ceil(std::log2(std::max(1.0, largest))) - 57.0))) {}

  BlockLedger::Grant take(double num_bytes, BlockUse use) {
    const auto wanted = pages(num_bytes);
    return wanted > 0 ? ledger_.take(wanted, use) : BlockLedger::Grant{};
  }
  void give_back(const BlockLedger::Grant& grant, double num_bytes) {
    if (grant.block_bytes > 0) ledger_.give_back(grant.block_bytes, pages(num_bytes));
  }
  double held() const { return static_cast<double>(ledger_.bytes_held()) * unit_; }

 private:
  int64_t pages(double num_bytes) const {
    const double rounded = std::ceil(std::max(0.0, num_bytes) / kPageBytes) * kPageBytes;
    return static_cast<int64_t>(rounded / unit_);
  }
  double unit_;
  BlockLedger ledger_;
};

// The requests of one step, in the order of the code.
class StepTrace final : public MemoryTrace {
 public:
  /// kept_in_pool: bytes that a plan keeps in the pool for the whole step.
  StepTrace(const StrategyModel& model, const StepSizes& sizes, const StrategyJob& job,
            double largest_request, std::vector<double> kept_in_pool = {})
      : model_(model),
        n_(sizes),
        job_(job),
        bytes_(job.row_bytes),
        P_(job.num_ranks()),
        E_(static_cast<double>(job.config.num_experts)),
        K_(static_cast<double>(job.config.top_k)),
        pool_(largest_request),
        kept_in_pool_(std::move(kept_in_pool)) {}

  // Forward and backward of a layer: rows are kept for backward, the experts' result is not;
  // backward sends the weights to the rows and returns their gradients.
  void run() {
    const Lease plan_weights = take_result(n_.tokens * K_ * kWeightBytes);
    std::vector<Lease> kept;
    for (const double num_bytes : kept_in_pool_) kept.push_back(take_result(num_bytes));
    plan();
    const Lease rows = take_rows(n_.padded * bytes_.tokens);
    const Lease row_scales = take_result(n_.padded * bytes_.scales);
    move_rows(Movement::kDispatch, bytes_.tokens);
    if (bytes_.scales > 0) {
      // Scales are in the pool, where peers cannot store them.
      const Lease landing = take_window(model_.reaches_peers() ? n_.padded * bytes_.scales : 0);
      move_rows(Movement::kDispatch, bytes_.scales);
    }
    Lease y = take_rows(n_.padded * bytes_.results);
    const Lease out = take_result(n_.tokens * bytes_.results);
    gather();
    y.end();

    const Lease grad_y = take_rows(n_.padded * bytes_.results);
    const Lease row_weights = take_result(n_.padded * kWeightBytes);
    exchange(n_.sent * kWeightBytes, n_.received * kWeightBytes);  // scatter_routes
    move_rows(Movement::kGradients, bytes_.results);
    const Lease grad_rows = take_rows(n_.padded * bytes_.results);
    const Lease grad_row_weights = take_result(n_.padded * kWeightBytes);
    const Lease grad_x = take_result(n_.tokens * bytes_.results);
    gather();
    const Lease grad_weights = take_result(n_.tokens * K_ * kWeightBytes);
    exchange(n_.received * kWeightBytes, n_.sent * kWeightBytes);  // gather_routes
  }

  MemoryNeed held() const {
    return {.window_bytes = windows_.held(), .pool_bytes = pool_.held(), .plan_bytes = plan_bytes_};
  }
  double largest_request() const { return largest_request_; }
  const std::vector<double>& kept_in_pool() const { return kept_in_pool_; }

  Lease take_scratch(double num_bytes) override { return take(num_bytes, BlockUse::kScratch); }
  void agree() override {
    const Lease header = take_scratch(kHeaderBytes);
    const Lease headers = take_scratch(P_ * kHeaderBytes);
  }
  void keep_in_pool(double num_bytes) override {
    largest_request_ = std::max(largest_request_, num_bytes);
    kept_in_pool_.push_back(num_bytes);
  }
  void keep_in_plan(double num_bytes) override { plan_bytes_ += num_bytes; }

 private:
  Lease take(double num_bytes, BlockUse use) {
    largest_request_ = std::max(largest_request_, num_bytes);
    return Lease([this, num_bytes, grant = pool_.take(num_bytes, use)] {
      pool_.give_back(grant, num_bytes);
    });
  }
  Lease take_result(double num_bytes) { return take(num_bytes, BlockUse::kResult); }
  Lease take_window(double num_bytes) {
    return Lease([this, block = windows_.take(num_bytes)] { windows_.give_back(block); });
  }
  Lease take_rows(double num_bytes) {
    return model_.reaches_peers() ? take_window(num_bytes) : take_result(num_bytes);
  }

  void plan() {
    const Lease counts = take_scratch(P_ * (E_ + 1) * kIndexBytes);
    agree();
    // The vectors of PlanData that grow with T or P * E.
    plan_bytes_ =
        n_.tokens * K_ * (4 + 2 * kIndexBytes) + n_.sent * kIndexBytes + 2 * P_ * E_ * kIndexBytes;
    kept_in_pool_.clear();
    model_.trace_plan(n_, job_, *this);
  }

  void move_rows(Movement movement, double row_bytes) {
    model_.trace_rows(movement, row_bytes, n_, job_, *this);
  }
  void gather() {
    const Movement movement = job_.config.partial_sums == PartialSums::kNone
                                  ? Movement::kCombine
                                  : Movement::kPartialSums;
    move_rows(movement, bytes_.of(movement));
  }

  const StrategyModel& model_;
  const StepSizes& n_;
  const StrategyJob& job_;
  RowBytes bytes_;
  double P_;
  double E_;
  double K_;
  PoolModel pool_;
  WindowModel windows_;
  std::vector<double> kept_in_pool_;
  double largest_request_ = 0;
  double plan_bytes_ = 0;
};

}  // namespace

MemoryNeed memory_of_step(const StrategyModel& model, const StepSizes& sizes,
                          const StrategyJob& job) {
  // In units of infinite size no request takes a block: this step only records the requests.
  StepTrace first(model, sizes, job, std::numeric_limits<double>::infinity());
  first.run();
  // The next step uses the blocks of this one differently; memory settles after a few steps.
  StepTrace trace(model, sizes, job, 2 * first.largest_request(), first.kept_in_pool());
  for (int step = 0; step < 4; ++step) trace.run();
  return trace.held();
}

}  // namespace crossdock
