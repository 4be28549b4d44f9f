#include "comm/cuda/sharing_choice.hpp"

#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/environment.hpp"
#include "core/packed_items.hpp"

namespace crossdock::cuda {
namespace {

constexpr const char* kSharingVariable = "CROSSDOCK_PEER_MEMORY";

struct Setting {
  const char* name;
  std::vector<MemorySharing> candidates;  // best first
};

Setting read_setting(const SharingArgs& args) {
  const std::string text = environment_variable(kSharingVariable);
  const std::string_view given = text.empty() ? "auto" : std::string_view(text);
  const bool is_known = given == "auto" || given == "fd" || given == "fabric" || given == "ipc";
  CROSSDOCK_CHECK(is_known, kSharingVariable, " must be auto, fd, fabric or ipc, got '", given,
                  "'");
  if (!args.reaches_peers) return {"none", {}};
  if (given == "fd") return {"fd", {MemorySharing::kDescriptors}};
  if (given == "fabric") return {"fabric", {MemorySharing::kFabric}};
  if (given == "ipc") return {"ipc", {MemorySharing::kIpc}};
  if (args.prefers_ipc) return {"auto:ipc", {MemorySharing::kIpc}};
  return {"auto", {MemorySharing::kDescriptors, MemorySharing::kFabric, MemorySharing::kIpc}};
}

Agreement agree(Group& group, std::span<const std::byte> body) {
  return group.agree({.operation = "plan", .body = body, .under_way = true});
}

// Runs one step of this rank and tells the others how it went. Returns why it failed on the first
// rank where it did, identically on every rank; empty if it succeeded on all.
template <typename Step>
std::string try_together(Group& group, const Step& step) {
  const std::optional<Error> error = refusal_of(step);
  const std::string own = error ? error->what() : "";
  const Agreement agreed = agree(group, std::as_bytes(std::span(own)));
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::span<const std::byte> reason = agreed.body(rank);
    if (reason.empty()) continue;
    return concat("rank ", rank, ": ",
                  std::string_view(reinterpret_cast<const char*>(reason.data()), reason.size()));
  }
  return {};
}

// An arena's card and its chunks so far.
struct Offer {
  ArenaCard card;
  std::vector<ChunkNotice> chunks;
};

std::vector<Offer> exchange_offers(Group& group, const Offer& own) {
  std::vector<std::byte> body;
  append_item(body, own.card);
  append_items(body, own.chunks);
  const Agreement agreed = agree(group, body);
  std::vector<Offer> offers;
  for (int rank = 0; rank < group.size(); ++rank) {
    std::span<const std::byte> bytes = agreed.body(rank);
    const auto card = split_item<ArenaCard>(bytes);
    const auto num_chunks = static_cast<int64_t>(bytes.size() / sizeof(ChunkNotice));
    offers.push_back({.card = card, .chunks = split_items<ChunkNotice>(bytes, num_chunks)});
  }
  return offers;
}

const char* event_of(MemorySharing sharing) {
  if (sharing == MemorySharing::kDescriptors) return "memory by descriptor";
  return sharing == MemorySharing::kFabric ? "memory by fabric" : "memory by ipc";
}

// Shares arenas in one way. Returns why that is impossible, identically on every rank; empty if
// `choice` has been made.
std::string try_sharing(Group& group, int device, SharingChoice& choice) {
  Offer own;
  std::string failure = try_together(group, [&] {
    choice.own = &SharedArena::of(device, choice.sharing);
    own = {.card = choice.own->card(), .chunks = choice.own->announce(0)};
  });
  if (!failure.empty()) return failure;
  const std::vector<Offer> offers = exchange_offers(group, own);
  const std::vector<int>& nodes = group.topology().node_of_rank;
  const auto for_each_peer = [&](const auto& visit) {
    for (size_t peer = 0; peer < offers.size(); ++peer) {
      const auto own_rank = static_cast<size_t>(group.rank());
      if (peer != own_rank && nodes[peer] == nodes[own_rank]) visit(peer);
    }
  };
  choice.peer_arenas.resize(offers.size());
  failure = try_together(group, [&] {
    for_each_peer([&](size_t peer) {
      choice.peer_arenas[peer] = PeerArena::open(offers[peer].card, choice.sharing, device);
    });
  });
  if (!failure.empty()) return failure;
  // All ranks have connected: pass them the chunks.
  failure = try_together(group, [&] {
    choice.own->announce(own.chunks.size());
    for_each_peer([&](size_t peer) {
      choice.peer_arenas[peer]->extend(offers[peer].chunks, *group.options().progress_deadline);
    });
  });
  choice.num_chunks = own.chunks.size();
  for (const ChunkNotice& chunk : own.chunks) choice.common_bytes += chunk.num_bytes;
  return failure;
}

}  // namespace

SharingChoice choose_sharing(Group& group, const SharingArgs& args) {
  Setting setting{"", {}};
  const std::optional<Error> refusal = refusal_of([&] {
    if (args.refusal != nullptr) throw Error(*args.refusal);
    setting = read_setting(args);
  });
  const Agreement agreed =
      group.agree({.operation = "plan",
                   .config = concat(args.config, ";device=cuda;peer_memory=", setting.name),
                   .refusal = as_refusal(refusal)});
  if (!args.reaches_peers) return {};
  std::string failure;
  for (const MemorySharing sharing : setting.candidates) {
    const EventRecorder::Scope recorded(group.recorder(), "plan", agreed.sequence, 0,
                                        event_of(sharing));
    SharingChoice choice{.sharing = sharing};
    failure = sharing == MemorySharing::kIpc ? "" : try_sharing(group, args.device, choice);
    group.log(LogLevel::kInfo, concat(event_of(sharing), " (", kSharingVariable, "=", setting.name,
                                      "): ", failure.empty() ? "chosen" : failure));
    if (failure.empty()) return choice;
  }
  throw Error(ErrorCode::kUnsupported,
              concat("GPU memory cannot be shared as ", kSharingVariable, "=", setting.name,
                     " demands; unset it to use what works. ", failure));
}

}  // namespace crossdock::cuda
