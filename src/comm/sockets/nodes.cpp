#include "comm/sockets/nodes.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace crossdock::comm {

ReachablePeers find_reachable_peers(const SocketsWorld& world) {
  ReachablePeers peers;
  peers.directories.resize(world.blobs.size());
  peers.reaches.assign(world.blobs.size(), 0);
  peers.reaches[static_cast<size_t>(world.rank)] = 1;
  const SocketsBlob& own = world.own();
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank == world.rank) continue;
    const auto r = static_cast<size_t>(rank);
    const SocketsBlob& blob = world.blobs[r];
    std::string why = "it runs in another container";
    if (is_visible(blob.process, own.process)) {
      peers.directories[r] = PeerDirectory::open(blob, why);
    }
    peers.reaches[r] = peers.directories[r] ? 1 : 0;
    const bool is_on_this_machine = own.machine != 0 && blob.machine == own.machine;
    if (!peers.directories[r] && is_on_this_machine && peers.note.empty()) {
      peers.note = concat("tcp on one machine: rank ", world.rank,
                          " cannot share memory with rank ", rank, " (", why, ")");
    }
  }
  return peers;
}

std::vector<int> group_into_nodes(std::span<const uint8_t> rows, int size) {
  const auto share = [&](int a, int b) {
    const auto p = static_cast<size_t>(size);
    return rows[static_cast<size_t>(a) * p + static_cast<size_t>(b)] != 0 &&
           rows[static_cast<size_t>(b) * p + static_cast<size_t>(a)] != 0;
  };
  std::vector<std::vector<int>> nodes;
  std::vector<int> node_of_rank;
  for (int rank = 0; rank < size; ++rank) {
    const auto fitting = std::find_if(nodes.begin(), nodes.end(), [&](const auto& members) {
      return std::all_of(members.begin(), members.end(),
                         [&](int member) { return share(rank, member); });
    });
    node_of_rank.push_back(static_cast<int>(fitting - nodes.begin()));
    if (fitting == nodes.end()) {
      nodes.push_back({rank});
    } else {
      fitting->push_back(rank);
    }
  }
  return node_of_rank;
}

}  // namespace crossdock::comm
