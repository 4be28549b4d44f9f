#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/sockets/directory.hpp"
#include "comm/sockets/endpoint.hpp"

namespace crossdock::comm {

/// The processes that share a node with this one: those that it sees and whose memory files it can
/// open.
struct ReachablePeers {
  std::vector<std::shared_ptr<PeerDirectory>> directories;  // [P]; null: not reachable, or itself
  std::vector<uint8_t> reaches;                             // [P] 1: reachable, or itself
  std::string note;  // about the first process on this machine that cannot be reached; else empty
};
ReachablePeers find_reachable_peers(const SocketsWorld& world);

/// Node ids [P] from the rows [P][P] of `reaches` of all ranks. Nodes are ordered by their lowest
/// rank. A rank joins the first node whose members all share memory with it, both ways.
std::vector<int> group_into_nodes(std::span<const uint8_t> rows, int size);

}  // namespace crossdock::comm
