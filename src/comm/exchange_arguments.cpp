#include "comm/exchange_arguments.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace crossdock::comm {

void check_blocks(const char* name, const SharedBytes& bytes, std::span<const int64_t> offsets,
                  int size) {
  CROSSDOCK_CHECK(offsets.size() == static_cast<size_t>(size) + 1, name, "_offsets must have ",
                  size + 1, " entries for ", size, " ranks, got ", offsets.size());
  CROSSDOCK_CHECK(offsets.front() >= 0 && std::is_sorted(offsets.begin(), offsets.end()), name,
                  "_offsets must be ascending and not negative");
  CROSSDOCK_CHECK(offsets.back() <= bytes.num_bytes, name, "_offsets end at byte ", offsets.back(),
                  " but ", name, " has ", bytes.num_bytes, " bytes");
}

void check_gather(const SharedBytes& send, const SharedBytes& recv,
                  std::span<const int64_t> recv_offsets, int rank, int size) {
  check_blocks("recv", recv, recv_offsets, size);
  const auto r = static_cast<size_t>(rank);
  const int64_t own_bytes = recv_offsets[r + 1] - recv_offsets[r];
  CROSSDOCK_CHECK(own_bytes == send.num_bytes, "recv_offsets give rank ", rank, " ", own_bytes,
                  " bytes, but it sends ", send.num_bytes);
}

void check_members(std::span<const int> members, int rank, int size) {
  CROSSDOCK_CHECK(!members.empty(), "a subgroup must have at least one member");
  CROSSDOCK_CHECK(members.front() >= 0 && members.back() < size, "members must be ranks from 0 to ",
                  size - 1, ", got ", members.front(), " to ", members.back());
  CROSSDOCK_CHECK(
      std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end(),
      "members of a subgroup must be ascending");
  CROSSDOCK_CHECK(std::binary_search(members.begin(), members.end(), rank), "rank ", rank,
                  " must be a member of the subgroup it makes");
}

int rank_among(std::span<const int> members, int rank) {
  return static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

void count_bytes(Traffic& traffic, const Topology& topology, int rank, int peer,
                 int64_t num_bytes) {
  if (peer == rank) return;
  const auto& node = topology.node_of_rank;
  const bool same_node = node[static_cast<size_t>(rank)] == node[static_cast<size_t>(peer)];
  (same_node ? traffic.bytes_within_node : traffic.bytes_between_nodes) += num_bytes;
}

}  // namespace crossdock::comm
