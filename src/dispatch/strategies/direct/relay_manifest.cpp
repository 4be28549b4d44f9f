#include <cstring>
#include <numeric>

#include "core/check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/peer_rows.hpp"
#include "dispatch/host/wire.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock {
namespace {

// Describes one copy to a gateway; the targets of all copies follow the headers.
struct CopyHeader {
  int64_t token = 0;
  int64_t num_targets = 0;
};

// Describes all copies that this rank sends to one gateway.
struct Manifest {
  std::vector<CopyHeader> copies;
  std::vector<RelayTarget> targets;
  std::vector<int64_t> slots;  // of the targets; not sent

  int64_t num_bytes() const {
    return static_cast<int64_t>(copies.size() * sizeof(CopyHeader) +
                                targets.size() * sizeof(RelayTarget));
  }
};

// The size of a manifest, known to both ends before it is sent.
struct ManifestSize {
  int64_t num_copies = 0;
  int64_t num_bytes = 0;
};

// Token by token, slot by slot: the first target of a token at a gateway starts a copy.
std::vector<Manifest> write_manifests(const StrategyCall& call, const Gateway& gateway) {
  const PlanData& plan = call.plan.data();
  std::vector<Manifest> manifests(static_cast<size_t>(plan.P));
  for (size_t slot = 0; slot < plan.expert_ids.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const int owner = plan.owner[static_cast<size_t>(plan.expert_ids[slot])];
    if (is_reachable(call, owner)) continue;
    Manifest& manifest = manifests[static_cast<size_t>(gateway(plan.rank, owner))];
    const int64_t token = static_cast<int64_t>(slot) / plan.K;
    if (manifest.copies.empty() || manifest.copies.back().token != token) {
      manifest.copies.push_back({.token = token});
    }
    ++manifest.copies.back().num_targets;
    manifest.slots.push_back(static_cast<int64_t>(slot));
    manifest.targets.push_back(
        {.rank = owner, .row = plan.final_rows[slot], .weight = weight_at(plan, slot)});
  }
  return manifests;
}

// Receives the sizes of the manifests for this rank, [P] by source. Each rank gets only its own:
// all sizes on every rank would grow with the square of P.
std::vector<ManifestSize> exchange_sizes(const StrategyCall& call,
                                         const std::vector<ManifestSize>& sizes) {
  Group& group = call.group;
  group.agree({.operation = call.operation,
               .subject = call.plan.id(),
               .config = concat("staging_bytes=", group.options().staging_bytes),
               .under_way = true});
  std::vector<int64_t> offsets(sizes.size() + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  const auto num_bytes = sizes.size() * sizeof(ManifestSize);
  const Buffer send = group.pool().take_scratch(static_cast<int64_t>(num_bytes));
  std::memcpy(send.data(), sizes.data(), num_bytes);
  const Buffer arrived = exchange_rows(call, {.send = send,
                                              .send_offsets = offsets,
                                              .recv_offsets = offsets,
                                              .row_bytes = sizeof(ManifestSize)});
  std::vector<ManifestSize> incoming(sizes.size());
  std::memcpy(incoming.data(), arrived.data(), num_bytes);
  return incoming;
}

void append(std::vector<int64_t>& offsets, int64_t count) {
  offsets.push_back(offsets.back() + count);
}

template <typename T>
std::byte* write(std::byte* to, const std::vector<T>& from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(T));
  return to + from.size() * sizeof(T);
}

// Stores at the source the copies that it announced to a gateway.
void keep_copies(const Manifest& manifest, Relay& relay) {
  for (const CopyHeader& copy : manifest.copies) {
    relay.copy_tokens.push_back(copy.token);
    append(relay.slot_offsets, copy.num_targets);
  }
  relay.slots.insert(relay.slots.end(), manifest.slots.begin(), manifest.slots.end());
}

// Reads a source's manifest at the gateway.
void read_manifest(const std::byte* from, const ManifestSize& size, Relay& relay) {
  std::vector<CopyHeader> copies(static_cast<size_t>(size.num_copies));
  const size_t header_bytes = copies.size() * sizeof(CopyHeader);
  const size_t target_bytes = static_cast<size_t>(size.num_bytes) - header_bytes;
  if (copies.empty()) return;
  std::memcpy(copies.data(), from, header_bytes);
  for (const CopyHeader& copy : copies) {
    relay.arrival_tokens.push_back(copy.token);
    append(relay.target_offsets, copy.num_targets);
  }
  const size_t first = relay.targets.size();
  relay.targets.resize(first + target_bytes / sizeof(RelayTarget));
  std::memcpy(relay.targets.data() + first, from + header_bytes, target_bytes);
}

}  // namespace

Relay make_relay(const StrategyCall& call, const Gateway& gateway) {
  const std::vector<Manifest> manifests = write_manifests(call, gateway);
  std::vector<ManifestSize> outgoing;
  outgoing.reserve(manifests.size());
  for (const Manifest& manifest : manifests) {
    outgoing.push_back({std::ssize(manifest.copies), manifest.num_bytes()});
  }
  const std::vector<ManifestSize> incoming = exchange_sizes(call, outgoing);

  Relay relay;
  relay.copy_offsets = relay.slot_offsets = relay.arrival_offsets = relay.target_offsets = {0};
  std::vector<int64_t> send_offsets{0};
  std::vector<int64_t> recv_offsets{0};
  for (size_t peer = 0; peer < manifests.size(); ++peer) {
    append(relay.copy_offsets, outgoing[peer].num_copies);
    append(send_offsets, outgoing[peer].num_bytes);
    append(relay.arrival_offsets, incoming[peer].num_copies);
    append(recv_offsets, incoming[peer].num_bytes);
  }

  const Buffer send = call.group.pool().take_scratch(send_offsets.back());
  std::byte* to = send.data();
  for (const Manifest& manifest : manifests) {
    keep_copies(manifest, relay);
    to = write(write(to, manifest.copies), manifest.targets);
  }
  const Buffer arrived = exchange_rows(
      call,
      {.send = send, .send_offsets = send_offsets, .recv_offsets = recv_offsets, .row_bytes = 1});
  for (size_t source = 0; source < incoming.size(); ++source) {
    read_manifest(arrived.data() + recv_offsets[source], incoming[source], relay);
  }
  relay.ranges = divide_tokens(call, relay);
  return relay;
}

}  // namespace crossdock
