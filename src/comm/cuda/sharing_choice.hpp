#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/cuda/shared_arena.hpp"
#include "core/cuda/physical_memory.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cuda {

/// How the processes of a group share memory, seen from one of them.
struct SharingChoice {
  MemorySharing sharing = MemorySharing::kIpc;
  SharedArena* own = nullptr;                             // this rank's; null with kIpc
  size_t num_chunks = 0;                                  // of own that all near ranks have mapped
  int64_t common_bytes = 0;                               // their bytes
  std::vector<std::shared_ptr<PeerArena>> peer_arenas{};  // [P]; null: far, this rank, or kIpc
};

struct SharingArgs {
  int device = 0;
  bool reaches_peers = true;       // false: kernels use no memory of other ranks; nothing is mapped
  bool prefers_ipc = false;        // unless CROSSDOCK_PEER_MEMORY says otherwise
  std::string config{};            // must be identical on every rank
  const Error* refusal = nullptr;  // why this rank refuses, if it does
};

/// Chooses the first kind of sharing that works between all ranks of every node, or the one that
/// CROSSDOCK_PEER_MEMORY names, and maps the arenas of the ranks on this node. kIpc is the last
/// resort and is not tried here. Every kind that is tried is recorded as an event. Part of the
/// operation "plan", before there is a plan. Collective. Throws the same error on all ranks if one
/// refuses or if nothing works; the group stays usable.
SharingChoice choose_sharing(Group& group, const SharingArgs& args);

}  // namespace crossdock::cuda
