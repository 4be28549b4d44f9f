#include "cost/cost_model.hpp"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "cost/step_sizes.hpp"
#include "cost/top_k_odds.hpp"
#include "crossdock/planner.hpp"
#include "plan/local_routes.hpp"
#include "plan/plan_builder.hpp"

namespace crossdock {
namespace {

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double time_at(double bytes, double rate) {
  return bytes > 0 ? bytes / rate : 0.0;
}

// Bytes of a row on each kind of link. A peer's rows are loaded before they are summed, unless they
// are joined.
LinkLoad link_row_bytes(const StrategyModel& model, Movement movement, const RowBytes& bytes,
                        bool is_joined) {
  const bool loads_rows = movement == Movement::kPartialSums && model.reaches_peers() && !is_joined;
  return {loads_rows ? bytes.results : bytes.of(movement), bytes.of(movement)};
}

std::optional<Drops> drops_of(const CostInputs& inputs) {
  if (!inputs.config.capacity) return std::nullopt;
  const Capacity& capacity = *inputs.config.capacity;
  const int64_t tokens = capacity.pad_to_capacity ? capacity.max_tokens : inputs.tokens;
  return Drops{.tokens = inputs.tokens,
               .capacity = capacity_rows(inputs.config, tokens),
               .policy = capacity.policy};
}

void set_times(const Fabric& fabric, OperationCost& cost) {
  const double within = time_at(cost.most_bytes.within_node, fabric.within_node_rate);
  const double between = time_at(cost.most_bytes.between_nodes, fabric.between_nodes_rate);
  const double memory = time_at(cost.memory_traffic, fabric.memory_rate);
  cost.lower_bound_s = std::max({within, between, memory});
  cost.serial_s = std::max(within, between) + memory;
}

void check_flow(const Strategy& strategy, const LinkFlow& flow, size_t num_ranks) {
  for (const auto* rows : {&flow.kept, &flow.sent_within, &flow.sent_between, &flow.received_within,
                           &flow.received_between}) {
    CROSSDOCK_CHECK(rows->size() == num_ranks, "the flow of strategy \"", strategy.name(),
                    "\" must have an entry for each of the ", num_ranks, " ranks, got ",
                    rows->size());
  }
}

}  // namespace

CostModel::CostModel(CostInputs inputs)
    : inputs_(std::move(inputs)),
      placement_(make_placement(inputs_.config, num_ranks())),
      spread_(expected_spread(placement_, inputs_.topology,
                              {.top_k = inputs_.config.top_k, .zipf = inputs_.zipf},
                              drops_of(inputs_))),
      sums_(expected_sums(spread_, inputs_.topology, inputs_.tokens)),
      bytes_(row_bytes_of(inputs_)),
      ranks_outside_(static_cast<size_t>(inputs_.topology.num_nodes), num_ranks()) {
  for (const int node : inputs_.topology.node_of_rank) {
    ranks_outside_[static_cast<size_t>(node)] -= 1.0;
  }
  expected_ = expected_sizes(sums_, inputs_, placement_, fullest_rank());
}

StrategyJob CostModel::job() const {
  const MpiOptions& mpi = inputs_.mpi;
  return {.config = inputs_.config,
          .topology = inputs_.topology,
          .tokens = static_cast<double>(inputs_.tokens),
          .row_bytes = bytes_,
          .staging_bytes = static_cast<double>(
              std::min(inputs_.staging_bytes, mpi.max_in_flight / 2 * mpi.chunk_bytes)),
          .spread = spread_,
          .sums = sums_};
}

// Whether the rows of one token on one rank are sent as one (StrategyModel::joins_rows).
bool CostModel::joins_rows(const StrategyModel& model, Movement movement) const {
  const Copies copies = inputs_.config.copies;
  bool is_wanted = inputs_.fabric.within_node_rate < inputs_.fabric.memory_rate;
  if (is_scatter(movement) && copies != Copies::kAuto) is_wanted = copies == Copies::kPerRank;
  const bool is_one_node = inputs_.topology.num_nodes == 1 && num_ranks() > 1;
  return is_wanted && is_one_node && model.joins_rows(movement);
}

OperationCost CostModel::operation(const Strategy& strategy, Movement movement) const {
  const StrategyModel& model = strategy.model();
  LinkFlow flow = model.flow(movement, sums_, inputs_.topology);
  check_flow(strategy, flow, sums_.tokens.size());
  const bool is_joined = joins_rows(model, movement);
  if (is_joined) flow = is_scatter(movement) ? sums_.ranks : sums_.ranks.reversed();
  const LinkLoad row_bytes = link_row_bytes(model, movement, bytes_, is_joined);
  OperationCost cost;
  cost.rows = {mean(flow.sent_within), mean(flow.sent_between)};
  cost.bytes = {cost.rows.within_node * row_bytes.within_node,
                cost.rows.between_nodes * row_bytes.between_nodes};
  cost.most_bytes = {flow.most_within() * row_bytes.within_node,
                     flow.most_between() * row_bytes.between_nodes};
  cost.memory_traffic = model.memory_traffic(movement, expected_, job());
  if (is_joined && is_scatter(movement)) {
    // Arrived rows that are copied on to other rows are read once more; each has at least one copy.
    const double arrived = expected_.sums_received;
    cost.memory_traffic +=
        bytes_.of(movement) * std::min(arrived, std::max(0.0, expected_.received - arrived));
  }
  if (movement == Movement::kDispatch) {
    add_requests(strategy, movement, bytes_.tokens, cost);
    add_requests(strategy, movement, bytes_.scales, cost);
  } else {
    add_requests(strategy, movement, row_bytes.between_nodes, cost);
  }
  set_times(inputs_.fabric, cost);
  return cost;
}

// Sends and receives of a rank in one round, on average. Place i, a rank or a node, gets T *
// rows_per_token[i] / rounds rows from all other ranks or (far_only) from those of other nodes.
double CostModel::count_messages(const std::vector<double>& rows_per_token, bool far_only,
                                 double row_bytes, double rounds) const {
  const auto chunk = static_cast<double>(inputs_.mpi.chunk_bytes);
  const bool by_node = rows_per_token.size() != sums_.tokens.size();
  double sends = 0;
  for (size_t i = 0; i < rows_per_token.size(); ++i) {
    const size_t node = by_node ? i : static_cast<size_t>(inputs_.topology.node_of_rank[i]);
    const double senders = far_only ? ranks_outside_[node] : num_ranks() - 1.0;
    const double rows = static_cast<double>(inputs_.tokens) * rows_per_token[i] / rounds;
    sends += senders * std::ceil(rows * row_bytes / chunk);
  }
  return 2.0 * sends / num_ranks();
}

void CostModel::add_requests(const Strategy& strategy, Movement movement, double row_bytes,
                             OperationCost& cost) const {
  if (row_bytes == 0) return;
  const StrategyModel& model = strategy.model();
  const MessageModel messages = model.messages(movement, row_bytes, job());
  if (messages.rounds == 0) return;
  const size_t num_places = messages.rows_per_token.size();
  CROSSDOCK_CHECK(num_places == sums_.tokens.size() || num_places == ranks_outside_.size(),
                  "the messages of strategy \"", strategy.name(),
                  "\" must be given for each of the ", sums_.tokens.size(),
                  " ranks or each of the ", ranks_outside_.size(), " nodes, got ", num_places);
  cost.rounds += messages.rounds;
  cost.requests += messages.rounds * count_messages(messages.rows_per_token, model.reaches_peers(),
                                                    row_bytes, messages.rounds);
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
      .most_rows = expected_.received,
      .most_experts = placement_.owner_offsets[largest + 1] - placement_.owner_offsets[largest]};
}

StepMemory CostModel::memory(const StrategyModel& model) const {
  const auto need = [&](const StepSizes& sizes) { return memory_of_step(model, sizes, job()); };
  const size_t largest = largest_rank();
  StepMemory memory{.expected = need(expected_),
                    .worst_case = need(worst_sizes(inputs_, placement_, largest))};
  if (inputs_.config.capacity || inputs_.config.max_rows) {
    memory.with_capacity = need(limited_sizes(inputs_, placement_, largest));
    // Fewer rows can take more memory if blocks of a pool then serve fewer requests.
    if (memory.with_capacity->total() < memory.expected.total()) {
      memory.with_capacity = memory.expected;
    }
  }
  return memory;
}

bool CostModel::fits(int64_t tokens, const StrategyList& candidates) {
  inputs_.tokens = tokens;
  sums_ = expected_sums(spread_, inputs_.topology, tokens);
  const auto limit = static_cast<double>(inputs_.fabric.memory_bytes);
  expected_ = expected_sizes(sums_, inputs_, placement_, fullest_rank());
  return std::any_of(candidates.begin(), candidates.end(), [&](const auto& strategy) {
    return memory_of_step(strategy->model(), expected_, job()).total() <= limit;
  });
}

StrategyCost CostModel::cost_of(const Strategy& strategy) const {
  StrategyCost cost{.name = std::string(strategy.name()),
                    .same_as = std::string(strategy.model().same_as(inputs_.topology)),
                    .dispatch = operation(strategy, Movement::kDispatch),
                    .combine = operation(strategy, Movement::kCombine),
                    .partial_sums = operation(strategy, Movement::kPartialSums),
                    .memory = memory(strategy.model())};
  const bool is_exact = inputs_.config.partial_sums == PartialSums::kNone;
  const OperationCost& back = is_exact ? cost.combine : cost.partial_sums;
  const auto at_once = [](const OperationCost& operation) {
    return operation.rounds > 0 ? std::ceil(operation.requests / operation.rounds) : 0.0;
  };
  cost.max_in_flight =
      static_cast<int64_t>(std::min(std::max(at_once(cost.dispatch), at_once(back)),
                                    static_cast<double>(inputs_.mpi.max_in_flight)));
  const OperationCost gradients = operation(strategy, Movement::kGradients);
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
  // Every rank must get its rows, and every node its copies, divided among its ranks.
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

namespace {

// Bytes per second; outside these limits, times and their ratios may not be finite.
constexpr double kLeastRate = 1;
constexpr double kLargestRate = 1e18;

void check_topology(const Topology& topology) {
  CROSSDOCK_CHECK(!topology.node_of_rank.empty(), "a group must have at least one rank, got 0");
  for (size_t rank = 0; rank < topology.node_of_rank.size(); ++rank) {
    const int node = topology.node_of_rank[rank];
    CROSSDOCK_CHECK(node >= 0 && node < topology.num_nodes, "the node of rank ", rank,
                    " must be in [0, ", topology.num_nodes, "), got ", node);
  }
}

void check_links(const CostInputs& inputs) {
  const Fabric& fabric = inputs.fabric;
  const auto is_legal = [](double rate) { return rate >= kLeastRate && rate <= kLargestRate; };
  CROSSDOCK_CHECK(is_legal(fabric.within_node_rate) && is_legal(fabric.between_nodes_rate) &&
                      is_legal(fabric.memory_rate),
                  "the rates of a fabric must be from ", kLeastRate, " to ", kLargestRate,
                  " bytes per second, got ", fabric.within_node_rate, " inside a node, ",
                  fabric.between_nodes_rate, " between nodes and ", fabric.memory_rate,
                  " in memory");
  CROSSDOCK_CHECK(fabric.memory_bytes >= 0,
                  "the memory of a fabric must not be negative (0: no limit is known), got ",
                  fabric.memory_bytes, " bytes");
  CROSSDOCK_CHECK(inputs.mpi.max_in_flight >= 2,
                  "max_in_flight must be at least 2 (one request each way), got ",
                  inputs.mpi.max_in_flight);
  constexpr int64_t kMaxChunkBytes = std::numeric_limits<int>::max();
  CROSSDOCK_CHECK(inputs.mpi.chunk_bytes >= 1 && inputs.mpi.chunk_bytes <= kMaxChunkBytes,
                  "chunk_bytes must be from 1 to ", kMaxChunkBytes, ", got ",
                  inputs.mpi.chunk_bytes);
  CROSSDOCK_CHECK(inputs.staging_bytes > 0, "staging_bytes must be positive, got ",
                  inputs.staging_bytes);
}

void check_skew(const CostInputs& inputs) {
  CROSSDOCK_CHECK(inputs.zipf >= 0 && inputs.zipf <= kMaxZipf, "zipf must be in [0, ", kMaxZipf,
                  "], got ", inputs.zipf);
  const int64_t E = inputs.config.num_experts;
  const int64_t K = inputs.config.top_k;
  CROSSDOCK_CHECK(inputs.zipf == 0 || K <= kMaxSkewedSlots / E,
                  "with zipf, top_k times num_experts must be at most ", kMaxSkewedSlots, ", got ",
                  K, " times ", E, "; the largest top_k is ", kMaxSkewedSlots / E);
  const auto is_short = [&](int64_t top_k) {
    const TopKDraw draw{.top_k = top_k, .zipf = inputs.zipf};
    return draw_steps(E, draw, inputs.config.capacity.has_value()) <= kMaxDrawSteps;
  };
  if (is_short(K)) return;
  int64_t largest = 0;
  for (int64_t too_large = K; too_large - largest > 1;) {
    const int64_t top_k = largest + (too_large - largest) / 2;
    (is_short(top_k) ? largest : too_large) = top_k;
  }
  const std::string advice = largest > 0 ? concat("the largest top_k is ", largest)
                                         : std::string("with so many experts zipf must be 0");
  CROSSDOCK_CHECK(false, "with zipf ", inputs.zipf, ", top_k (", K, ") and num_experts (", E,
                  ") are too large to plan in reasonable time; ", advice);
}

}  // namespace

void check_cost_inputs(const CostInputs& inputs) {
  check_topology(inputs.topology);
  check_config(inputs.config, static_cast<int>(inputs.topology.node_of_rank.size()));
  CROSSDOCK_CHECK(inputs.tokens >= 0 && inputs.tokens <= kMaxTokens, "tokens must be from 0 to ",
                  kMaxTokens, ", got ", inputs.tokens);
  check_skew(inputs);
  check_links(inputs);
}

namespace {

// If two times differ by less than this factor, the earlier candidate is chosen.
constexpr double kTieFactor = 1.02;

std::vector<const StrategyCost*> by_preference(std::span<const StrategyCost> costs) {
  std::vector<const StrategyCost*> sorted;
  for (const StrategyCost& cost : costs) sorted.push_back(&cost);
  std::stable_sort(sorted.begin(), sorted.end(), [](const StrategyCost* a, const StrategyCost* b) {
    return a->preference < b->preference;
  });
  return sorted;
}

std::string rounded(double value) {
  std::ostringstream out;
  out << std::setprecision(3) << value;
  return out.str();
}

// "0.998 rows per token between nodes and 7.2 inside them"
std::string rows_per_token(const CostInputs& inputs, const OperationCost& cost) {
  const auto T = static_cast<double>(std::max<int64_t>(inputs.tokens, 1));
  std::string text;
  if (inputs.topology.num_nodes > 1) {
    text = rounded(cost.rows.between_nodes / T) + " rows per token between nodes and ";
  }
  return text + rounded(cost.rows.within_node / T) + " inside " +
         (inputs.topology.num_nodes > 1 ? "them" : "the node");
}

std::string reason_for(const CostInputs& inputs, std::span<const StrategyCost> costs,
                       const StrategyCost& best) {
  if (inputs.topology.node_of_rank.size() == 1) return "one rank: nothing travels";
  const StrategyCost* next = nullptr;
  std::string same;
  for (const StrategyCost& cost : costs) {
    if (cost.name == best.name) continue;
    if (cost.same_as == best.name) {
      same += "; " + cost.name + " is the same thing " +
              (inputs.topology.num_nodes == 1 ? "inside one node" : "on these nodes");
    } else if (next == nullptr || cost.step_serial_s < next->step_serial_s) {
      next = &cost;
    }
  }
  std::string text = "dispatch sends " + rows_per_token(inputs, best.dispatch);
  if (next != nullptr) {
    text += "; " + next->name + ", the next best, " + rows_per_token(inputs, next->dispatch);
  }
  if (next != nullptr && best.step_serial_s > 0) {
    const double ratio = next->step_serial_s / best.step_serial_s;
    text += " and takes " +
            (ratio < kTieFactor ? "as long" : rounded(ratio) + " times as long, copies included");
  }
  return text + same;
}

}  // namespace

StrategyChoice choose_strategy(const CostInputs& inputs, std::span<const StrategyCost> costs) {
  CROSSDOCK_CHECK(!costs.empty(), "there must be at least one strategy to choose from, got none");
  const auto limit = static_cast<double>(inputs.fabric.memory_bytes);
  const auto fits = [&](const StrategyCost& cost) {
    return limit == 0 || cost.memory.expected.total() <= limit;
  };
  const bool any_fits = std::any_of(costs.begin(), costs.end(), fits);
  const StrategyCost* best = nullptr;
  for (const StrategyCost* cost : by_preference(costs)) {
    if (any_fits && !fits(*cost)) continue;
    if (best == nullptr || cost->step_serial_s * kTieFactor < best->step_serial_s) best = cost;
  }
  return {.name = best->name, .reason = reason_for(inputs, costs, *best)};
}

StrategyChoice resolve_strategy(std::string_view name, const DispatchConfig& config,
                                const Topology& topology, const StrategyList& candidates) {
  if (name != "auto") return {.name = std::string(name), .reason = "as given"};
  CostInputs inputs{.config = config, .topology = topology, .tokens = 4096};
  inputs.fabric.memory_bytes = 0;  // the number of tokens is not known yet
  return choose_strategy(inputs, estimate_costs(inputs, candidates).strategies);
}

namespace {

// The largest number of tokens, up to `most`, with which some candidate fits.
int64_t search_fitting_tokens(CostModel& model, const StrategyList& candidates, int64_t most) {
  if (model.fits(most, candidates)) return most;
  int64_t fitting = 0;
  int64_t too_many = most;
  while (too_many - fitting > 1) {
    const int64_t tokens = fitting + (too_many - fitting) / 2;
    (model.fits(tokens, candidates) ? fitting : too_many) = tokens;
  }
  return fitting;
}

}  // namespace

CostEstimate estimate_costs(const CostInputs& inputs, const StrategyList& candidates) {
  check_cost_inputs(inputs);
  CROSSDOCK_CHECK(candidates.begin() != candidates.end(),
                  "candidates must have at least one strategy, got none");
  const CostModel model(inputs);
  CostEstimate estimate;
  estimate.routing = model.routing();
  estimate.least_dispatch = model.least_dispatch();
  for (const auto& strategy : candidates) {
    estimate.strategies.push_back(model.cost_of(*strategy));
    estimate.strategies.back().preference = std::ssize(estimate.strategies) - 1;
  }
  std::sort(estimate.strategies.begin(), estimate.strategies.end(),
            [](const StrategyCost& a, const StrategyCost& b) { return a.name < b.name; });
  return estimate;
}

int64_t largest_fitting_tokens(const CostInputs& inputs, const StrategyList& candidates) {
  check_cost_inputs(inputs);
  CostInputs tried = inputs;
  CostModel model(tried);
  tried.tokens = search_fitting_tokens(model, candidates, inputs.tokens);
  if (!inputs.config.capacity || tried.tokens == inputs.tokens) return tried.tokens;
  // With fewer tokens a capacity drops a different share of the routes. Repeat the search with that
  // share until the number of tokens found agrees with it. The share hardly changes.
  constexpr int kMaxPasses = 32;
  int64_t largest = 0;
  for (int pass = 0; pass < kMaxPasses; ++pass) {
    model = CostModel(tried);
    const int64_t found = search_fitting_tokens(model, candidates, inputs.tokens);
    if (found >= tried.tokens) largest = std::max(largest, tried.tokens);
    if (found == tried.tokens) break;
    tried.tokens = found;
  }
  return largest;
}

}  // namespace crossdock
