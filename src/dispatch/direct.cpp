#include "dispatch/direct.hpp"

#include <cstring>
#include <utility>
#include <vector>

#include "comm/window.hpp"
#include "dispatch/peer_rows.hpp"
#include "dispatch/plan_builder.hpp"
#include "dispatch/relay.hpp"
#include "dispatch/row_return.hpp"
#include "dispatch/source_partials.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

/// What a plan keeps: the relayed copies (none where all ranks share a node) and, with partial
/// sums, how they are added up.
struct DirectState {
  Relay relay;
  SourcePartials partials;
};

bool has_far_ranks(const Exchange& exchange) {
  return exchange.group.topology().num_nodes > 1;
}

// The owner of a kept route.
int owner_of(const PlanData& plan, size_t slot) {
  return plan.owner[static_cast<size_t>(plan.expert_ids[slot])];
}

// Where every copy of every token goes on this node: [T, K], null for routes to other nodes.
std::vector<std::byte*> near_destinations(const Exchange& exchange, const PeerRows& peers,
                                          size_t entry, int64_t row_bytes) {
  const PlanData& plan = exchange.plan.data();
  std::vector<std::byte*> destinations(plan.expert_ids.size(), nullptr);
  for (size_t slot = 0; slot < destinations.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    std::byte* rows = peers.at(owner_of(plan, slot), entry);
    if (rows != nullptr) destinations[slot] = rows + plan.final_rows[slot] * row_bytes;
  }
  return destinations;
}

void zero_pad_rows(const PlanData& plan, std::byte* rows, int64_t row_bytes) {
  for (const RowRange& pad : pad_rows(plan)) {
    std::memset(rows + pad.first * row_bytes, 0, static_cast<size_t>(pad.count * row_bytes));
  }
}

class Direct final : public Strategy {
 public:
  /// by_node: one copy and one partial sum per node, otherwise per rank.
  Direct(std::string_view name, bool by_node) : name_(name), by_node_(by_node) {}

  std::string_view name() const override { return name_; }

  std::shared_ptr<const void> prepare(const Exchange& exchange) override {
    auto state = std::make_shared<DirectState>();
    const Topology& topology = exchange.group.topology();
    if (has_far_ranks(exchange)) {
      state->relay = make_relay(
          exchange, by_node_ ? gateway_per_node(topology) : Gateway(gateway_is_destination));
    }
    if (exchange.plan.data().config->partial_sums) {
      state->partials = make_source_partials(exchange, state->relay, [&](int rank) {
        return by_node_ ? topology.node_of_rank[static_cast<size_t>(rank)] : rank;
      });
    }
    return state;
  }

  void scatter(const Exchange& exchange, std::span<const RowPart> parts) override {
    const PlanData& plan = exchange.plan.data();
    std::vector<ShownRows> shown;
    for (const RowPart& part : parts) {
      shown.push_back(ShownRows::to_fill(exchange, part.rows, plan.num_rows() * part.row_bytes));
      if (shown.back().data() != part.rows) {
        zero_pad_rows(plan, shown.back().data(), part.row_bytes);
      }
    }
    const PeerRows peers(exchange, shown);
    for (size_t entry = 0; entry < parts.size(); ++entry) {
      const RowPart& part = parts[entry];
      const auto destinations = near_destinations(exchange, peers, entry, part.row_bytes);
      ops::fan_out({.x = part.tokens,
                    .destinations = destinations.data(),
                    .T = plan.T,
                    .K = plan.K,
                    .row_bytes = part.row_bytes});
      if (has_far_ranks(exchange)) {
        const auto& state = exchange.plan.strategy_state<DirectState>();
        relay_rows(exchange, state.relay, part, peers, entry);
      }
    }
    end_exchange(exchange);
    for (const ShownRows& rows : shown) rows.fetch(exchange);
  }

  void gather_sum(const Exchange& exchange, const GatherSumArgs& args) override {
    const ShownRows shown = show(exchange, args.rows);
    const PeerRows peers(exchange, {&shown, 1});
    return_and_sum(exchange, {.sum = args,
                              .is_near = [&](int rank) { return is_reachable(exchange, rank); },
                              .near_rows = [&](int rank) { return peers.at(rank); },
                              .all_near = !has_far_ranks(exchange)});
    end_exchange(exchange);
  }

  void gather_partial_sums(const Exchange& exchange, const GatherSumArgs& args) override {
    const auto& state = exchange.plan.strategy_state<DirectState>();
    const ShownRows shown = show(exchange, args.rows);
    const PeerRows peers(exchange, {&shown, 1});
    Buffer returned;
    if (has_far_ranks(exchange)) returned = return_partials(exchange, state.relay, args, peers);
    sum_grouped(exchange, state.partials, returned, peers, args);
    end_exchange(exchange);
  }

  OwnedTensor allocate_rows(const Exchange& exchange, DType dtype, Shape shape) override {
    const Buffer lease = exchange.group.windows().take(shape.num_elements() * size_of(dtype));
    return {.view = lease.view(dtype, shape), .owner = lease.owner()};
  }

 private:
  static ShownRows show(const Exchange& exchange, const ConstTensorView& rows) {
    return ShownRows::to_read(exchange, static_cast<const std::byte*>(rows.data), rows.num_bytes());
  }

  std::string_view name_;
  bool by_node_;
};

}  // namespace

std::unique_ptr<Strategy> make_direct() {
  return std::make_unique<Direct>("direct", /*by_node=*/false);
}

std::unique_ptr<Strategy> make_hierarchical() {
  return std::make_unique<Direct>("hierarchical", /*by_node=*/true);
}

}  // namespace crossdock
