#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/group.hpp"

namespace crossdock {

struct ThreadOptions {
  int ranks_per_node = 0;  // > 0: ranks per simulated node, for tests; 0: one node
  GroupOptions group{};    // for the groups that run_ranks makes
};

/// Communicators for `size` ranks that are threads of this process; element r belongs to rank r.
/// Each may be used by any thread, but by only one at a time.
CROSSDOCK_API std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int size, const ThreadOptions& options = {});

/// Runs body(group) on `size` threads, one per rank, and waits for all of them. A rank that throws
/// or returns leaves its group, so that its peers do not wait for it. Returns the exception of each
/// rank (null if it returned normally).
CROSSDOCK_API std::vector<std::exception_ptr> try_ranks(int size,
                                                        const std::function<void(Group&)>& body,
                                                        const ThreadOptions& options = {});

/// Like try_ranks, but throws the exception of the rank that failed first, if any.
CROSSDOCK_API void run_ranks(int size, const std::function<void(Group&)>& body,
                             const ThreadOptions& options = {});

}  // namespace crossdock
