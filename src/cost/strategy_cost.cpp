#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "cost/cost_check.hpp"
#include "cost/step_memory.hpp"
#include "cost/step_sizes.hpp"
#include "cost/strategy_flow.hpp"
#include "cost/top_k_odds.hpp"
#include "crossdock/planner.hpp"
#include "plan/capacity.hpp"
#include "plan/placement.hpp"

namespace crossdock {
namespace {

struct NamedKind {
  std::string_view name;
  StrategyKind kind;
};

constexpr std::array kKinds = {
    NamedKind{"allgather", StrategyKind::kAllgather},
    NamedKind{"alltoall", StrategyKind::kAlltoall},
    NamedKind{"direct", StrategyKind::kDirect},
    NamedKind{"hierarchical", StrategyKind::kHierarchical},
};

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double most(const std::vector<double>& a, const std::vector<double>& b) {
  return std::max(*std::max_element(a.begin(), a.end()), *std::max_element(b.begin(), b.end()));
}

double times_at(double bytes, double rate) {
  return bytes > 0 ? bytes / rate : 0.0;
}

bool goes_out(Movement movement) {
  return movement == Movement::kDispatch || movement == Movement::kGradients;
}

// Bytes of a row on its way, by link.
LinkLoad link_row_bytes(StrategyKind kind, Movement movement, const RowBytes& bytes) {
  if (movement == Movement::kDispatch) {
    return {bytes.tokens + bytes.scales, bytes.tokens + bytes.scales};
  }
  if (movement == Movement::kPartialSums) {
    return {reaches_peers(kind) ? bytes.results : bytes.partial, bytes.partial};
  }
  return {bytes.results, bytes.results};
}

// Rows that one rank's memory reads and writes on the way out, counted from the code. Stores of
// peers into this memory and their loads from it count here.
double rows_touched_out(StrategyKind kind, const StepSizes& n, bool has_far_ranks) {
  if (kind == StrategyKind::kAllgather) {  // copy, send; receive; gather
    return 3 * n.tokens + n.all_tokens + 2 * n.received;
  }
  if (kind == StrategyKind::kAlltoall) {  // pack, send; receive, regroup
    return n.tokens + n.kept + 2 * (n.sent - n.kept) + 3 * (n.received - n.kept);
  }
  const double relayed = has_far_ranks ? 3 * n.copies_sent + 2 * n.copies_received : 0.0;
  return n.tokens + n.received + relayed;
}

// The same on the way back, exact.
double rows_touched_back(StrategyKind kind, const StepSizes& n, bool has_far_ranks) {
  if (!reaches_peers(kind)) {  // pack, send; receive, sum
    return 3 * (n.received - n.kept) + 2 * (n.sent - n.kept) + n.kept + n.tokens;
  }
  const double relayed = has_far_ranks ? 2 * n.targets_received + 2 * n.far_sent : 0.0;
  return n.received + relayed + n.tokens;
}

// Partial sums written and read again.
double sums_touched(StrategyKind kind, const StepSizes& n, bool has_far_ranks) {
  if (kind == StrategyKind::kAllgather) return 4 * n.all_tokens;
  if (kind == StrategyKind::kAlltoall) return 2 * n.sums_received + 2 * n.sums_sent;
  const double relayed = has_far_ranks ? 2 * n.copies_received + 2 * n.copies_sent : 0.0;
  return 2 * n.near_sums + relayed;
}

double memory_traffic(StrategyKind kind, Movement movement, const StepSizes& n, const RowBytes& b,
                      bool has_far_ranks) {
  if (goes_out(movement)) {
    const double row = movement == Movement::kDispatch ? b.tokens + b.scales : b.results;
    return row * rows_touched_out(kind, n, has_far_ranks);
  }
  if (movement == Movement::kCombine) return b.results * rows_touched_back(kind, n, has_far_ranks);
  return b.results * (n.received + n.tokens) + b.partial * sums_touched(kind, n, has_far_ranks);
}

std::optional<Drops> drops_of(const CostInputs& inputs) {
  if (!inputs.config.capacity) return std::nullopt;
  const Capacity& capacity = *inputs.config.capacity;
  const int64_t tokens = capacity.pad_to_capacity ? capacity.max_tokens : inputs.tokens;
  return Drops{.tokens = inputs.tokens,
               .capacity = capacity_rows(inputs.config, tokens),
               .policy = capacity.policy};
}

// Everything about the inputs that is computed once.
class CostModel {
 public:
  explicit CostModel(CostInputs inputs)
      : inputs_(std::move(inputs)),
        placement_(make_placement(inputs_.config, num_ranks())),
        spread_(expected_spread(placement_, inputs_.topology,
                                {.top_k = inputs_.config.top_k, .zipf = inputs_.zipf},
                                drops_of(inputs_))),
        sums_(expected_sums(spread_, inputs_.topology, inputs_.tokens)),
        bytes_(row_bytes_of(inputs_)) {
    const auto num_nodes = static_cast<size_t>(inputs_.topology.num_nodes);
    ranks_outside_.assign(num_nodes, num_ranks());
    routes_to_node_.assign(num_nodes, 0.0);
    one_per_rank_.assign(inputs_.topology.node_of_rank.size(), 1.0);
    for (size_t rank = 0; rank < one_per_rank_.size(); ++rank) {
      const auto node = static_cast<size_t>(inputs_.topology.node_of_rank[rank]);
      ranks_outside_[node] -= 1.0;
      routes_to_node_[node] += spread_.routes_to_rank[rank];
    }
  }

  StrategyCost cost_of(const NamedKind& named) const;
  /// Whether some strategy's expected memory fits with so many tokens; they are the model's then.
  /// With a capacity the routes that are kept stay those of the tokens that the model was made for.
  bool fits(int64_t tokens);
  OperationCost least_dispatch() const;
  RoutingEstimate routing() const;

 private:
  int num_ranks() const { return static_cast<int>(inputs_.topology.node_of_rank.size()); }
  bool has_far_ranks() const { return inputs_.topology.num_nodes > 1; }
  OperationCost operation(StrategyKind kind, Movement movement) const;
  void add_requests(StrategyKind kind, Movement movement, double row_bytes,
                    OperationCost& cost) const;
  double count_messages(const std::vector<double>& rows_to, bool far_only, double row_bytes,
                        double rounds) const;
  StepMemory memory(StrategyKind kind) const;
  size_t fullest_rank() const;
  size_t largest_rank() const;

  CostInputs inputs_;
  Placement placement_;
  TokenSpread spread_;
  RouteSums sums_;
  RowBytes bytes_;
  std::vector<double> ranks_outside_;   // [nodes] ranks of other nodes
  std::vector<double> routes_to_node_;  // [nodes] per token
  std::vector<double> one_per_rank_;    // [P] ones
};

void set_times(const Fabric& fabric, OperationCost& cost) {
  const double within = times_at(cost.most_bytes.within_node, fabric.within_node_rate);
  const double between = times_at(cost.most_bytes.between_nodes, fabric.between_nodes_rate);
  const double memory = times_at(cost.memory_traffic, fabric.memory_rate);
  cost.lower_bound_s = std::max({within, between, memory});
  cost.serial_s = std::max(within, between) + memory;
}

OperationCost CostModel::operation(StrategyKind kind, Movement movement) const {
  const LinkFlow flow = flow_of(kind, movement, sums_, inputs_.topology);
  const LinkLoad row_bytes = link_row_bytes(kind, movement, bytes_);
  OperationCost cost;
  cost.rows = {mean(flow.sent_within), mean(flow.sent_between)};
  cost.bytes = {cost.rows.within_node * row_bytes.within_node,
                cost.rows.between_nodes * row_bytes.between_nodes};
  cost.most_bytes = {most(flow.sent_within, flow.received_within) * row_bytes.within_node,
                     most(flow.sent_between, flow.received_between) * row_bytes.between_nodes};
  const StepSizes sizes = expected_sizes(sums_, inputs_, placement_, kind, fullest_rank());
  cost.memory_traffic = memory_traffic(kind, movement, sizes, bytes_, has_far_ranks());
  if (movement == Movement::kDispatch) {
    add_requests(kind, movement, bytes_.tokens, cost);
    add_requests(kind, movement, bytes_.scales, cost);
  } else {
    add_requests(kind, movement, row_bytes.between_nodes, cost);
  }
  set_times(inputs_.fabric, cost);
  return cost;
}

// Sends and receives of a rank in one exchange, if every rank has T * rows_to[i] rows for place i,
// a rank or a node, on all other ranks or (far_only) on those of other nodes.
double CostModel::count_messages(const std::vector<double>& rows_to, bool far_only,
                                 double row_bytes, double rounds) const {
  const auto chunk = static_cast<double>(inputs_.engine.chunk_bytes);
  const bool by_node = rows_to.size() != sums_.tokens.size();
  double sends = 0;
  for (size_t i = 0; i < rows_to.size(); ++i) {
    const size_t node = by_node ? i : static_cast<size_t>(inputs_.topology.node_of_rank[i]);
    const double senders = far_only ? ranks_outside_[node] : num_ranks() - 1.0;
    const double rows = static_cast<double>(inputs_.tokens) * rows_to[i] / rounds;
    sends += senders * std::ceil(rows * row_bytes / chunk);
  }
  return 2.0 * sends / num_ranks();
}

void CostModel::add_requests(StrategyKind kind, Movement movement, double row_bytes,
                             OperationCost& cost) const {
  if (row_bytes == 0 || (reaches_peers(kind) && !has_far_ranks())) return;
  const LinkFlow flow = flow_of(kind, movement, sums_, inputs_.topology);
  const RelayLoad load{.routes = 0,  // even ones
                       .travelling = most(flow.sent_between, flow.received_between) /
                                     std::max(1.0, static_cast<double>(inputs_.tokens)),
                       .are_sums = movement == Movement::kPartialSums};
  const double rounds = reaches_peers(kind)
                            ? std::max(1.0, std::ceil(static_cast<double>(inputs_.tokens) /
                                                      tokens_per_round(inputs_, load, row_bytes)))
                            : 1.0;
  const std::vector<double>* rows_to = nullptr;
  if (kind == StrategyKind::kAllgather && movement != Movement::kCombine) {
    rows_to = &one_per_rank_;
  } else if (kind == StrategyKind::kHierarchical) {
    rows_to = movement == Movement::kCombine ? &routes_to_node_ : &spread_.reaches_node;
  } else if (movement == Movement::kCombine ||
             (goes_out(movement) && kind == StrategyKind::kAlltoall)) {
    rows_to = &spread_.routes_to_rank;
  } else {
    rows_to = &spread_.reaches_rank;
  }
  cost.rounds += rounds;
  cost.requests += rounds * count_messages(*rows_to, reaches_peers(kind), row_bytes, rounds);
}

// The rank with the most rows; without rows, the first.
size_t CostModel::fullest_rank() const {
  size_t fullest = 0;
  for (size_t rank = 1; rank < sums_.tokens.size(); ++rank) {
    if (sums_.routes.total_received(rank) > sums_.routes.total_received(fullest)) fullest = rank;
  }
  return fullest;
}

// The rank with the most experts.
size_t CostModel::largest_rank() const {
  const std::vector<int64_t>& offsets = placement_.owner_offsets;
  size_t largest = 0;
  for (size_t rank = 1; rank < sums_.tokens.size(); ++rank) {
    if (offsets[rank + 1] - offsets[rank] > offsets[largest + 1] - offsets[largest]) largest = rank;
  }
  return largest;
}

RoutingEstimate CostModel::routing() const {
  const auto sum = [](const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0);
  };
  const size_t largest = largest_rank();
  const double kept = sum(spread_.routes_to_rank) / static_cast<double>(inputs_.config.top_k);
  return {
      .ranks_per_token = sum(spread_.reaches_rank),
      .nodes_per_token = sum(spread_.reaches_node),
      .rows_per_rank = mean(sums_.routes.kept) + mean(sums_.routes.sent_within) +
                       mean(sums_.routes.sent_between),
      .dropped_share = inputs_.config.capacity ? std::max(0.0, 1.0 - kept) : 0.0,
      .most_rows = sums_.routes.total_received(fullest_rank()),
      .most_experts = placement_.owner_offsets[largest + 1] - placement_.owner_offsets[largest]};
}

StepMemory CostModel::memory(StrategyKind kind) const {
  const auto need = [&](const StepSizes& sizes) { return memory_of_step(sizes, inputs_, kind); };
  const size_t fullest = fullest_rank();
  const size_t largest = largest_rank();
  StepMemory memory{.expected = need(expected_sizes(sums_, inputs_, placement_, kind, fullest)),
                    .worst_case = need(worst_sizes(inputs_, placement_, kind, largest))};
  if (inputs_.config.capacity || inputs_.config.max_rows) {
    memory.with_capacity = need(limited_sizes(inputs_, placement_, kind, largest));
    // Fewer rows can take more memory, where blocks of a pool serve fewer requests.
    if (memory.with_capacity->total() < memory.expected.total()) {
      memory.with_capacity = memory.expected;
    }
  }
  return memory;
}

bool CostModel::fits(int64_t tokens) {
  inputs_.tokens = tokens;
  sums_ = expected_sums(spread_, inputs_.topology, tokens);
  const auto limit = static_cast<double>(inputs_.fabric.memory_bytes);
  return std::any_of(kKinds.begin(), kKinds.end(), [&](const NamedKind& named) {
    const StepSizes sizes = expected_sizes(sums_, inputs_, placement_, named.kind, fullest_rank());
    return memory_of_step(sizes, inputs_, named.kind).total() <= limit;
  });
}

StrategyCost CostModel::cost_of(const NamedKind& named) const {
  StrategyCost cost{.name = std::string(named.name),
                    .dispatch = operation(named.kind, Movement::kDispatch),
                    .combine = operation(named.kind, Movement::kCombine),
                    .partial_sums = operation(named.kind, Movement::kPartialSums),
                    .memory = memory(named.kind)};
  const OperationCost& back = inputs_.config.partial_sums ? cost.partial_sums : cost.combine;
  const auto at_once = [](const OperationCost& operation) {
    return operation.rounds > 0 ? std::ceil(operation.requests / operation.rounds) : 0.0;
  };
  cost.max_in_flight =
      static_cast<int64_t>(std::min(std::max(at_once(cost.dispatch), at_once(back)),
                                    static_cast<double>(inputs_.engine.max_in_flight)));
  const OperationCost gradients = operation(named.kind, Movement::kGradients);
  cost.step_lower_bound_s =
      cost.dispatch.lower_bound_s + gradients.lower_bound_s + 2 * back.lower_bound_s;
  cost.step_serial_s = cost.dispatch.serial_s + gradients.serial_s + 2 * back.serial_s;
  return cost;
}

OperationCost CostModel::least_dispatch() const {
  const double between = mean(sums_.nodes.sent_between);
  const double to_others = mean(sums_.ranks.sent_within) + mean(sums_.ranks.sent_between);
  const double row_bytes = bytes_.tokens + bytes_.scales;
  OperationCost cost;
  cost.rows = {std::max(0.0, to_others - between), between};
  cost.bytes = {cost.rows.within_node * row_bytes, between * row_bytes};
  // Every rank must get its rows, and every node the copies for it, shared by its ranks.
  cost.most_bytes = cost.bytes;
  const auto T = static_cast<double>(inputs_.tokens);
  for (size_t rank = 0; rank < sums_.tokens.size(); ++rank) {
    const auto node = static_cast<size_t>(inputs_.topology.node_of_rank[rank]);
    const double node_size = num_ranks() - ranks_outside_[node];
    cost.most_bytes.within_node =
        std::max(cost.most_bytes.within_node, sums_.ranks.received_within[rank] * row_bytes);
    cost.most_bytes.between_nodes =
        std::max(cost.most_bytes.between_nodes,
                 T * spread_.reaches_node[node] * ranks_outside_[node] / node_size * row_bytes);
  }
  cost.memory_traffic = row_bytes * (mean(sums_.tokens) + to_others + mean(sums_.ranks.kept));
  set_times(inputs_.fabric, cost);
  return cost;
}

// The largest number of tokens, up to `most`, that fits.
int64_t search_fitting_tokens(CostModel& model, int64_t most) {
  if (model.fits(most)) return most;
  int64_t fitting = 0;
  int64_t too_many = most;
  while (too_many - fitting > 1) {
    const int64_t tokens = fitting + (too_many - fitting) / 2;
    (model.fits(tokens) ? fitting : too_many) = tokens;
  }
  return fitting;
}

}  // namespace

CostEstimate estimate_costs(const CostInputs& inputs) {
  check_cost_inputs(inputs);
  const CostModel model(inputs);
  CostEstimate estimate;
  estimate.routing = model.routing();
  estimate.least_dispatch = model.least_dispatch();
  estimate.strategies.reserve(kKinds.size());
  for (const NamedKind& named : kKinds) estimate.strategies.push_back(model.cost_of(named));
  return estimate;
}

int64_t largest_fitting_tokens(const CostInputs& inputs) {
  check_cost_inputs(inputs);
  CostInputs tried = inputs;
  CostModel model(tried);
  tried.tokens = search_fitting_tokens(model, inputs.tokens);
  if (!inputs.config.capacity || tried.tokens == inputs.tokens) return tried.tokens;
  // With fewer tokens a capacity drops another share of the routes, with which the search is done
  // again, until a number of tokens is found with its own share. The share hardly changes.
  constexpr int kMaxPasses = 32;
  int64_t largest = 0;
  for (int pass = 0; pass < kMaxPasses; ++pass) {
    model = CostModel(tried);
    const int64_t found = search_fitting_tokens(model, inputs.tokens);
    if (found >= tried.tokens) largest = std::max(largest, tried.tokens);
    if (found == tried.tokens) break;
    tried.tokens = found;
  }
  return largest;
}

}  // namespace crossdock
