#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "comm/memory/window.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/peer_rows.hpp"
#include "dispatch/host/wire.hpp"
#include "dispatch/path.hpp"
#include "dispatch/strategies/direct/direct.hpp"
#include "dispatch/strategies/direct/relay.hpp"
#include "dispatch/strategies/list.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"
#include "plan/plan_builder.hpp"

// Ranks on this rank's node are near: their memory is loaded and stored directly. All others are
// far: copies go to a gateway in rounds (relay.hpp). A variant says which rank is the gateway: the
// destination itself with direct, one rank of its node with hierarchical. docs/strategies.md has
// the steps.
namespace crossdock {
namespace {

/// State in a plan: the relayed copies (none if all ranks share a node) and, with partial sums, how
/// they are added up.
struct DirectState {
  Relay relay;
  SourcePartials partials;
};

bool has_far_ranks(const StrategyCall& call) {
  return call.group.topology().num_nodes > 1;
}

Relay no_copies(int num_ranks) {
  Relay relay;
  relay.copy_offsets.assign(static_cast<size_t>(num_ranks) + 1, 0);
  relay.arrival_offsets = relay.copy_offsets;
  relay.slot_offsets = relay.target_offsets = {0};
  return relay;
}

// The rows of every route to this node: [T, K], null for routes to other nodes and unused slots.
template <typename Byte>
std::vector<Byte*> near_rows_as(const StrategyCall& call, const PeerRows& peers, size_t entry,
                                int64_t row_bytes) {
  const PlanData& plan = call.plan.data();
  std::vector<Byte*> result(plan.expert_ids.size(), nullptr);
  for (size_t slot = 0; slot < result.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const int owner = plan.owner[static_cast<size_t>(plan.expert_ids[slot])];
    Byte* rows = peers.at(owner, entry);
    if (rows != nullptr) result[slot] = rows + plan.final_rows[slot] * row_bytes;
  }
  return result;
}

std::vector<std::byte*> near_destinations(const StrategyCall& call, const PeerRows& peers,
                                          size_t entry, int64_t row_bytes) {
  return near_rows_as<std::byte>(call, peers, entry, row_bytes);
}

std::vector<const std::byte*> near_rows(const StrategyCall& call, const PeerRows& peers,
                                        int64_t row_bytes) {
  return near_rows_as<const std::byte>(call, peers, 0, row_bytes);
}

// The rounds in which rows are sent between nodes; none if all ranks share a node.
std::vector<RelayRound> rounds_between_nodes(const StrategyCall& call, const Relay& relay,
                                             RelayedRows travelling, int64_t row_bytes) {
  if (!has_far_ranks(call)) return {};
  return relay_rounds(call, relay, travelling, row_bytes);
}

// Computes rows [first, last) of args.out, each from its K rows, given by address.
void sum_tokens(const StrategyCall& call, const GatherSumArgs& args,
                const std::vector<const std::byte*>& rows, int64_t first, int64_t last) {
  const PlanData& plan = call.plan.data();
  const auto* weights = static_cast<const std::byte*>(args.weights.data);
  if (weights != nullptr) weights += first * plan.K * size_of(plan.weight_dtype);
  ops::sum_rows({.rows = rows.data() + first * plan.K,
                 .K = plan.K,
                 .weights = weights,
                 .out = static_cast<std::byte*>(args.out.data) + first * args.out.row_bytes(),
                 .N = last - first,
                 .D = args.out.shape[1],
                 .row_dtype = args.rows.dtype,
                 .out_dtype = args.out.dtype},
                *call.group.threads());
}

class Direct final : public Strategy {
 public:
  explicit Direct(const DirectVariant& variant) : variant_(variant) {}

  std::string_view name() const override { return variant_.name; }

  std::unique_ptr<Path> make_device_path(const PathContext& context, Device device) const override {
    return variant_.make_device_path(context, device);
  }

  std::shared_ptr<const void> prepare(const StrategyCall& call) override {
    auto state = std::make_shared<DirectState>();
    const Topology& topology = call.group.topology();
    if (has_far_ranks(call)) {
      state->relay = make_relay(call, variant_.make_gateway(topology));
    } else {
      state->relay = no_copies(call.group.size());
      state->relay.ranges = divide_tokens(call, state->relay);
    }
    if (call.plan.data().config->partial_sums != PartialSums::kNone) {
      state->partials = make_source_partials(
          call, state->relay, [&](int rank) { return variant_.sum_group_of(topology, rank); });
    }
    return state;
  }

  void scatter(const StrategyCall& call, std::span<const RowPart> parts) override {
    const std::vector<ExposedRows> shown = expose_for_writing(call, parts);
    const PeerRows peers = exchange_addresses(call, shown);
    scatter_parts(call, call.plan.strategy_state<DirectState>().relay, parts, shown, peers);
  }

  void scatter_chunks(const StrategyCall& call, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    const PlanData& plan = call.plan.data();
    const std::vector<Relay> relays =
        split_relay(call.plan.strategy_state<DirectState>().relay, plan, chunks);
    const std::vector<ExposedRows> shown = expose_for_writing(call, parts);
    const PeerRows peers = exchange_addresses(call, shown);
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Plan part(std::make_shared<const PlanData>(part_of_plan(plan, chunks[i])), nullptr);
      scatter_parts({call.group, part, call.sequence, call.operation}, relays[i], parts, shown,
                    peers);
      arrived(i);
    }
  }

  void gather_sum(const StrategyCall& call, const GatherSumArgs& args) override {
    const PlanData& plan = call.plan.data();
    const ExposedRows shown = show(call, args.rows);
    const PeerRows peers = exchange_addresses(call, {&shown, 1});
    std::vector<const std::byte*> rows = near_rows(call, peers, args.rows.row_bytes());
    if (!has_far_ranks(call)) sum_tokens(call, args, rows, 0, plan.T);
    const Relay& relay = call.plan.strategy_state<DirectState>().relay;
    for (const RelayRound& round :
         rounds_between_nodes(call, relay, RelayedRows::kRoutes, args.rows.row_bytes())) {
      const ReturnedRows returned = return_round(call, relay, round, args, peers);
      for (size_t i = 0; i < returned.numbers.size(); ++i) {
        rows[static_cast<size_t>(returned.numbers[i])] =
            returned.rows.data() + static_cast<int64_t>(i) * args.rows.row_bytes();
      }
      sum_tokens(call, args, rows, std::min(round.first_token, plan.T),
                 std::min(round.last_token, plan.T));
    }
    barrier(call);
  }

  void gather_partial_sums(const StrategyCall& call, const GatherSumArgs& args) override {
    const int64_t T = call.plan.data().T;
    const auto& state = call.plan.strategy_state<DirectState>();
    const ExposedRows shown = show(call, args.rows);
    const PeerRows peers = exchange_addresses(call, {&shown, 1});
    for (const RelayRound& round :
         relay_rounds(call, state.relay, RelayedRows::kSums, partial_row_bytes(call, args))) {
      ReturnedRows returned;
      if (has_far_ranks(call)) {
        returned = return_round_sums(call, state.relay, round, args, peers);
      }
      sum_grouped(call, peers,
                  {.partials = state.partials,
                   .returned = returned,
                   .first_token = std::min(round.first_token, T),
                   .last_token = std::min(round.last_token, T),
                   .sum = args});
    }
    barrier(call);
  }

  OwnedTensor allocate_rows(const StrategyCall& call, DType dtype, Shape shape) override {
    const int64_t num_bytes = TensorView(nullptr, dtype, shape).num_bytes();
    return owned_tensor(comm::windows_of(call.group).take(num_bytes), dtype, shape);
  }

  const StrategyModel& model() const override { return variant_.model; }

 private:
  static std::vector<ExposedRows> expose_for_writing(const StrategyCall& call,
                                                     std::span<const RowPart> parts) {
    std::vector<ExposedRows> shown;
    for (const RowPart& part : parts) {
      const int64_t num_bytes = call.plan.num_rows() * part.row_bytes;
      shown.push_back(ExposedRows::to_fill(call, part.rows, num_bytes));
    }
    return shown;
  }

  // Moves all rows of the plan, including the relayed copies.
  static void scatter_parts(const StrategyCall& call, const Relay& relay,
                            std::span<const RowPart> parts, std::span<const ExposedRows> shown,
                            const PeerRows& peers) {
    const PlanData& plan = call.plan.data();
    for (size_t entry = 0; entry < parts.size(); ++entry) {
      const RowPart& part = parts[entry];
      const auto destinations = near_destinations(call, peers, entry, part.row_bytes);
      ops::fan_out({.x = part.tokens,
                    .destinations = destinations.data(),
                    .T = plan.T,
                    .K = plan.K,
                    .row_bytes = part.row_bytes},
                   *call.group.threads());
      for (const RelayRound& round :
           rounds_between_nodes(call, relay, RelayedRows::kCopies, part.row_bytes)) {
        relay_round_out(call, relay, round, part, peers, entry);
      }
    }
    barrier(call);
    for (size_t entry = 0; entry < parts.size(); ++entry) {
      shown[entry].fetch(call, parts[entry].row_bytes);
    }
  }

  static ExposedRows show(const StrategyCall& call, const ConstTensorView& rows) {
    return ExposedRows::to_read(call, static_cast<const std::byte*>(rows.data), rows.num_bytes());
  }

  DirectVariant variant_;
};

// One copy per token and far rank.
class DirectModel final : public RelayModel {
 public:
  LinkFlow flow(Movement movement, const RouteSums& sums,
                const Topology& /*topology*/) const override {
    if (movement == Movement::kCombine) return sums.routes.reversed();
    const LinkFlow flow = flow_with_copies(sums.routes, sums.ranks);
    return is_scatter(movement) ? flow : flow.reversed();
  }
  bool joins_rows(Movement movement) const override { return movement != Movement::kCombine; }

 protected:
  const CopySizes& copies(const StepSizes& sizes) const override { return sizes.per_rank; }
  std::vector<double> rows_per_token(Movement movement, const StrategyJob& job) const override {
    return movement == Movement::kCombine ? job.spread.routes_to_rank : job.spread.reaches_rank;
  }
};

}  // namespace

const Relay& relay_of(const Plan& plan) {
  return plan.strategy_state<DirectState>().relay;
}

const SourcePartials& partials_of(const Plan& plan) {
  return plan.strategy_state<DirectState>().partials;
}

std::unique_ptr<Strategy> make_direct_variant(const DirectVariant& variant) {
  return std::make_unique<Direct>(variant);
}

/// Writes every row directly to its final place in the receiver's memory, and combine reads it
/// there. Between nodes a token is sent once per destination rank.
std::unique_ptr<Strategy> make_direct() {
  static const DirectModel kModel;
  return make_direct_variant(
      {.name = "direct",
       .make_gateway = [](const Topology&) -> Gateway { return gateway_is_destination; },
       .sum_group_of = [](const Topology&, int rank) { return rank; },
       .make_device_path = [](const PathContext& context, Device device) -> std::unique_ptr<Path> {
         if constexpr (CROSSDOCK_HAS_CUDA) return make_direct_device_path(context, device);
         throw no_cuda_error();
       },
       .model = kModel});
}

}  // namespace crossdock
