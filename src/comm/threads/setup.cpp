#include "comm/threads/board.hpp"
#include "comm/threads/communicator.hpp"
#include "core/check.hpp"
#include "core/threading.hpp"
#include "crossdock/mesh.hpp"
#include "crossdock/threads.hpp"

namespace crossdock {

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size,
                                                                     const ThreadOptions& options) {
  CROSSDOCK_CHECK(size >= 1 && size <= kMaxMeshRanks, "the number of ranks must be in [1, ",
                  kMaxMeshRanks, "], got ", size);
  CROSSDOCK_CHECK(options.ranks_per_node >= 0, "ranks_per_node must be 0 (one node) or positive, ",
                  "got ", options.ranks_per_node);
  auto board = std::make_shared<comm::ThreadBoard>(
      size,
      options.ranks_per_node > 0 ? Topology::uniform(size, options.ranks_per_node)
                                 : Topology::single_node(size),
      /*may_spin=*/size <= detail::num_cores());
  std::vector<std::unique_ptr<Communicator>> communicators;
  communicators.reserve(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    communicators.push_back(std::make_unique<comm::ThreadCommunicator>(board, rank));
  }
  return communicators;
}

}  // namespace crossdock
