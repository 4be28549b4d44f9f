#include "comm/cuda/peer_memory.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "comm/agreement/items.hpp"
#include "comm/attachment.hpp"
#include "comm/cuda/gpu_reach.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/process.hpp"

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
    if (comm::gpu_pretences_of(group).shares_no_arenas) {
      throw Error(ErrorCode::kUnsupported, "this process does not share virtual memory");
    }
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

namespace {

constexpr int kPretendedDevice = -1;
constexpr int64_t kAllBytes = std::numeric_limits<int64_t>::max();  // of one address space

std::vector<int> all_devices() {
  int count = 0;
  CROSSDOCK_CUDA(cudaGetDeviceCount(&count));
  std::vector<int> devices(static_cast<size_t>(count));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

// The base may be null: offsets are addresses then.
std::byte* at_offset(std::byte* base, int64_t offset) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<intptr_t>(base) + offset);  // NOLINT
}

[[noreturn]] void throw_unreachable(int peer, cudaError_t status) {
  const std::string call = concat("cudaIpcOpenMemHandle for memory of rank ", peer,
                                  " (every rank must be a process of its own, and the ranks of a "
                                  "node must be able to share GPU memory)");
  throw_error(status, call.c_str());
}

}  // namespace

PeerMemory::PeerMemory(const Communicator& communicator, int device, bool peers_are_elsewhere)
    : needs_export_(!communicator.shares_address_space() && communicator.size() > 1),
      topology_(communicator.topology()),
      rank_(communicator.rank()),
      device_(device),
      peers_are_elsewhere_(peers_are_elsewhere),
      choice_{.sharing = MemorySharing::kNone},
      common_bytes_(needs_export_ ? 0 : kAllBytes) {
  if (peers_are_elsewhere_) {
    peer_devices_ = {kPretendedDevice};
  } else if (communicator.shares_address_space() && communicator.size() > 1) {
    peer_devices_ = all_devices();
  }
}

bool PeerMemory::is_near(int peer) const {
  const std::vector<int>& nodes = topology_.node_of_rank;
  return nodes[static_cast<size_t>(peer)] == nodes[static_cast<size_t>(rank_)];
}

PeerMemory::~PeerMemory() {
  if (mappings_.empty()) return;
  const DeviceGuard guard(device_, std::nothrow);
  const RelaxedCapture relaxed;
  for (const auto& [key, base] : mappings_) cudaIpcCloseMemHandle(base);
}

void PeerMemory::set_peer_devices(std::vector<int> devices) {
  if (!peers_are_elsewhere_) peer_devices_ = std::move(devices);
}

bool PeerMemory::needs_copy(const void* data) const {
  if (needs_export_) return true;
  const bool has_others =
      std::ranges::any_of(peer_devices_, [&](int peer) { return peer != device_; });
  if (!has_others) return false;  // without asking the driver
  const MemoryKind kind = kind_of(data);
  const auto is_granted_to = [&](int peer) {
    return kind == MemoryKind::kGranted && peer != kPretendedDevice && has_access(peer, data);
  };
  std::vector<PeerDevice> peers;
  for (const int peer : peer_devices_) {
    peers.push_back({.device = peer, .has_access = is_granted_to(peer)});
  }
  return cuda::needs_copy(device_, kind, peers);
}

void PeerMemory::share_memory(Group& group, SharingArgs args) {
  if (!needs_export_) return;
  args.device = device_;
  choice_ = choose_sharing(group, args);
  timeout_ = *group.options().progress_deadline;
  common_bytes_ = choice_.common_bytes;
}

MemoryHandle PeerMemory::show(const void* data, const MemoryBlock& block) const {
  MemoryHandle handle{};
  handle.device = -1;
  if (data == nullptr) return handle;
  handle.device = device_;
  handle.is_shared = needs_export_ ? 1 : 0;
  if (has_offsets()) {
    handle.offset = offset_of(data);
    return handle;
  }
  handle.base = block.base;
  handle.offset = static_cast<const std::byte*>(data) - block.base;
  CROSSDOCK_CUDA(cudaIpcGetMemHandle(&handle.exported, block.base));
  return handle;
}

std::byte* PeerMemory::reach(int peer, const MemoryHandle& handle) {
  if (handle.device < 0) return nullptr;
  if (!has_offsets()) return reach_allocation(peer, handle);
  if (handle.is_shared == 0 && reached_devices_.insert(handle.device).second) {
    enable_peer_access(device_, handle.device);
  }
  return at_offset(base_of(peer), handle.offset);
}

std::byte* PeerMemory::reach_allocation(int peer, const MemoryHandle& handle) {
  if (peer == rank_) return handle.base + handle.offset;
  std::string bytes(reinterpret_cast<const char*>(&handle.exported), sizeof(handle.exported));
  const auto [found, is_new] = mappings_.try_emplace({peer, std::move(bytes)}, nullptr);
  if (is_new) {
    const CallGuard guard(device_);
    const cudaError_t status =
        cudaIpcOpenMemHandle(&found->second, handle.exported, cudaIpcMemLazyEnablePeerAccess);
    if (status != cudaSuccess) {
      mappings_.erase(found);
      throw_unreachable(peer, status);
    }
  }
  return static_cast<std::byte*>(found->second) + handle.offset;
}

PeerArena* PeerMemory::arena_of(int peer) const {
  return choice_.own == nullptr ? nullptr : choice_.peer_arenas[static_cast<size_t>(peer)].get();
}

int64_t PeerMemory::offset_of(const void* data) const {
  return reinterpret_cast<intptr_t>(data) - reinterpret_cast<intptr_t>(base_of(rank_));
}

std::byte* PeerMemory::base_of(int peer) const {
  if (choice_.own == nullptr) return nullptr;
  return peer == rank_ ? choice_.own->arena().base() : arena_of(peer)->base();
}

int64_t PeerMemory::mapped_bytes(int peer) const {
  if (choice_.own == nullptr) return kAllBytes;
  return peer == rank_ ? choice_.own->arena().num_bytes() : arena_of(peer)->num_bytes();
}

std::vector<ChunkNotice> PeerMemory::news() {
  if (choice_.own == nullptr || choice_.own->arena().num_bytes() == common_bytes_) return {};
  return choice_.own->announce(choice_.num_chunks);
}

void PeerMemory::note_heard(std::span<const ChunkNotice> news) {
  for (const ChunkNotice& notice : news) {
    if (static_cast<size_t>(notice.index) < choice_.num_chunks)
      continue;  // published in the
                 // meantime
    ++choice_.num_chunks;
    common_bytes_ += notice.num_bytes;
  }
}

void PeerMemory::hear(int peer, std::span<const ChunkNotice> news) {
  if (PeerArena* arena = arena_of(peer)) arena->extend(news, timeout_);
}

void PeerMemory::publish() {
  CROSSDOCK_ASSERT(grows_alone());
  if (choice_.own == nullptr || choice_.own->arena().num_bytes() == common_bytes_) return;
  const SharedArena::Extent published = choice_.own->publish(timeout_);
  choice_.num_chunks = published.num_chunks;
  common_bytes_ = published.num_bytes;
}

std::shared_ptr<const void> PeerMemory::watch_owners(
    const std::function<void(int peer)>& callback) const {
  auto watches = std::make_shared<std::vector<std::shared_ptr<const void>>>();
  for (int peer = 0; peer < std::ssize(choice_.peer_arenas); ++peer) {
    PeerArena* arena = arena_of(peer);
    if (arena == nullptr) continue;
    watches->push_back(arena->watch_owner([callback, peer] { callback(peer); }));
  }
  return watches;
}

void PeerMemory::skip_unmapping() {
  mappings_.clear();
  for (const std::shared_ptr<PeerArena>& arena : choice_.peer_arenas) leak(arena);
}

}  // namespace crossdock::cuda
