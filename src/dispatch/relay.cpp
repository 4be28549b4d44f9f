#include "dispatch/relay.hpp"

#include <cstring>

#include "dispatch/partial_sums.hpp"
#include "dispatch/wire.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

// What a source tells a gateway of one copy; its targets follow.
struct CopyHeader {
  int64_t num_targets = 0;
};

// Everything this rank tells one gateway.
struct Manifest {
  std::vector<int64_t> tokens;  // of the copies
  std::vector<CopyHeader> copies;
  std::vector<RelayTarget> targets;

  int64_t num_bytes() const {
    return static_cast<int64_t>(copies.size() * sizeof(CopyHeader) +
                                targets.size() * sizeof(RelayTarget));
  }
};

double weight_at(const PlanData& plan, size_t slot) {
  const ConstTensorView weights(plan.weights.data(), plan.weight_dtype, {plan.T, plan.K});
  return plan.weight_dtype == DType::kF64 ? weights.as<double>()[slot]
                                          : static_cast<double>(weights.as<float>()[slot]);
}

// Token by token, slot by slot: the first target of a token at a gateway opens a copy.
std::vector<Manifest> write_manifests(const Exchange& exchange, const Gateway& gateway) {
  const PlanData& plan = exchange.plan.data();
  std::vector<Manifest> manifests(static_cast<size_t>(plan.P));
  for (size_t slot = 0; slot < plan.expert_ids.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const int owner = plan.owner[static_cast<size_t>(plan.expert_ids[slot])];
    if (is_reachable(exchange, owner)) continue;
    Manifest& manifest = manifests[static_cast<size_t>(gateway(plan.rank, owner))];
    const int64_t token = static_cast<int64_t>(slot) / plan.K;
    if (manifest.tokens.empty() || manifest.tokens.back() != token) {
      manifest.tokens.push_back(token);
      manifest.copies.push_back({});
    }
    ++manifest.copies.back().num_targets;
    manifest.targets.push_back(
        {.rank = owner, .row = plan.final_rows[slot], .weight = weight_at(plan, slot)});
  }
  return manifests;
}

// The sizes of all manifests, [P, P, {copies, bytes}] by source and gateway, known to all ranks.
std::vector<int64_t> exchange_sizes(const Exchange& exchange,
                                    const std::vector<Manifest>& manifests) {
  std::vector<int64_t> sizes;
  for (const Manifest& manifest : manifests) {
    sizes.push_back(static_cast<int64_t>(manifest.copies.size()));
    sizes.push_back(manifest.num_bytes());
  }
  const Agreement agreement = exchange.group.agree({.operation = exchange.operation,
                                                    .subject = exchange.plan.id(),
                                                    .config = {},
                                                    .body = std::as_bytes(std::span(sizes)),
                                                    .rejection = nullptr});
  std::vector<int64_t> all(static_cast<size_t>(agreement.offsets.back()) / sizeof(int64_t));
  std::memcpy(all.data(), agreement.bytes.data(), all.size() * sizeof(int64_t));
  return all;
}

void append(std::vector<int64_t>& offsets, int64_t count) {
  offsets.push_back(offsets.back() + count);
}

void write_bytes(std::byte*& to, const void* from, size_t num_bytes) {
  if (num_bytes > 0) std::memcpy(to, from, num_bytes);
  to += num_bytes;
}

// A gateway reads what one source told it.
void read_manifest(const std::byte* from, int64_t num_copies, int64_t num_bytes, Relay& relay) {
  std::vector<CopyHeader> copies(static_cast<size_t>(num_copies));
  const size_t header_bytes = copies.size() * sizeof(CopyHeader);
  if (!copies.empty()) std::memcpy(copies.data(), from, header_bytes);
  for (const CopyHeader& copy : copies) append(relay.target_offsets, copy.num_targets);
  const size_t first = relay.targets.size();
  const size_t target_bytes = static_cast<size_t>(num_bytes) - header_bytes;
  relay.targets.resize(first + target_bytes / sizeof(RelayTarget));
  if (target_bytes > 0) {
    std::memcpy(relay.targets.data() + first, from + header_bytes, target_bytes);
  }
}

}  // namespace

int gateway_is_destination(int /*source*/, int destination) {
  return destination;
}

Gateway gateway_per_node(const Topology& topology) {
  std::vector<std::vector<int>> nodes;
  for (int node = 0; node < topology.num_nodes; ++node) {
    nodes.push_back(topology.ranks_of_node(node));
  }
  std::vector<size_t> place(topology.node_of_rank.size());
  for (const std::vector<int>& ranks : nodes) {
    for (size_t i = 0; i < ranks.size(); ++i) place[static_cast<size_t>(ranks[i])] = i;
  }
  return [nodes = std::move(nodes), place = std::move(place), node_of = topology.node_of_rank](
             int source, int destination) {
    const std::vector<int>& node =
        nodes[static_cast<size_t>(node_of[static_cast<size_t>(destination)])];
    return node[place[static_cast<size_t>(source)] % node.size()];
  };
}

Relay make_relay(const Exchange& exchange, const Gateway& gateway) {
  const auto P = static_cast<size_t>(exchange.group.size());
  const auto rank = static_cast<size_t>(exchange.group.rank());
  const std::vector<Manifest> manifests = write_manifests(exchange, gateway);
  const std::vector<int64_t> sizes = exchange_sizes(exchange, manifests);

  Relay relay{.copy_tokens = {},
              .copy_offsets = {0},
              .arrival_offsets = {0},
              .target_offsets = {0},
              .targets = {}};
  std::vector<int64_t> send_offsets{0};
  std::vector<int64_t> recv_offsets{0};
  for (size_t peer = 0; peer < P; ++peer) {
    append(relay.copy_offsets, sizes[(rank * P + peer) * 2]);
    append(send_offsets, sizes[(rank * P + peer) * 2 + 1]);
    append(relay.arrival_offsets, sizes[(peer * P + rank) * 2]);
    append(recv_offsets, sizes[(peer * P + rank) * 2 + 1]);
  }

  const Buffer send = exchange.group.pool().take(send_offsets.back());
  std::byte* to = send.data();
  for (const Manifest& manifest : manifests) {
    relay.copy_tokens.insert(relay.copy_tokens.end(), manifest.tokens.begin(),
                             manifest.tokens.end());
    write_bytes(to, manifest.copies.data(), manifest.copies.size() * sizeof(CopyHeader));
    write_bytes(to, manifest.targets.data(), manifest.targets.size() * sizeof(RelayTarget));
  }
  const Buffer arrived = exchange_rows(
      exchange,
      {.send = send, .send_offsets = send_offsets, .recv_offsets = recv_offsets, .row_bytes = 1});
  for (size_t source = 0; source < P; ++source) {
    read_manifest(arrived.data() + recv_offsets[source], sizes[(source * P + rank) * 2],
                  sizes[(source * P + rank) * 2 + 1], relay);
  }
  return relay;
}

void relay_rows(const Exchange& exchange, const Relay& relay, const RowPart& part,
                const PeerRows& peers, size_t entry) {
  const auto num_copies = static_cast<int64_t>(relay.copy_tokens.size());
  Buffer packed = exchange.group.pool().take(num_copies * part.row_bytes);
  ops::gather_rows({.x = part.tokens,
                    .index = relay.copy_tokens.data(),
                    .rows = packed.data(),
                    .num_rows = num_copies,
                    .row_bytes = part.row_bytes});
  const Buffer arrived = exchange_rows(exchange, {.send = packed,
                                                  .send_offsets = relay.copy_offsets,
                                                  .recv_offsets = relay.arrival_offsets,
                                                  .row_bytes = part.row_bytes});
  packed = {};
  std::vector<std::byte*> destinations;
  for (size_t copy = 0; copy + 1 < relay.target_offsets.size(); ++copy) {
    destinations.clear();
    for (int64_t i = relay.target_offsets[copy]; i < relay.target_offsets[copy + 1]; ++i) {
      const RelayTarget& target = relay.targets[static_cast<size_t>(i)];
      destinations.push_back(peers.at(static_cast<int>(target.rank), entry) +
                             target.row * part.row_bytes);
    }
    ops::fan_out({.x = arrived.data() + static_cast<int64_t>(copy) * part.row_bytes,
                  .destinations = destinations.data(),
                  .T = 1,
                  .K = std::ssize(destinations),
                  .row_bytes = part.row_bytes});
  }
}

Buffer return_partials(const Exchange& exchange, const Relay& relay, const GatherSumArgs& args,
                       const PeerRows& peers) {
  const int64_t row_bytes = args.rows.row_bytes();
  const DType dtype = partial_dtype(args);
  std::vector<const std::byte*> rows;
  std::vector<double> weights;
  for (const RelayTarget& target : relay.targets) {
    rows.push_back(peers.at(static_cast<int>(target.rank)) + target.row * row_bytes);
    weights.push_back(target.weight);
  }
  const std::vector<float> float_weights(weights.begin(), weights.end());
  const void* typed = dtype == DType::kF64 ? static_cast<const void*>(weights.data())
                                           : static_cast<const void*>(float_weights.data());
  const int64_t num_arrivals = relay.arrival_offsets.back();
  const Buffer sums = exchange.group.pool().take(num_arrivals * partial_row_bytes(args));
  ops::sum_rows({.rows = rows.data(),
                 .offsets = relay.target_offsets.data(),
                 .weights = args.weights.given() ? typed : nullptr,
                 .out = sums.data(),
                 .N = num_arrivals,
                 .D = args.rows.shape[1],
                 .row_dtype = args.rows.dtype,
                 .out_dtype = dtype});
  return exchange_rows(exchange, {.send = sums,
                                  .send_offsets = relay.arrival_offsets,
                                  .recv_offsets = relay.copy_offsets,
                                  .row_bytes = partial_row_bytes(args)});
}

}  // namespace crossdock
