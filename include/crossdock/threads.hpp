#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/group.hpp"

namespace crossdock {

struct ThreadOptions {
  int ranks_per_node = 0;  // > 0: treat every so many ranks as one node (for tests); 0: one node
  GroupOptions group{};    // of the groups that run_ranks makes
};

/// The P communicators of ranks that are threads of this process; element r is rank r's.
/// Each is then used by its own thread (one thread at a time, any thread).
CROSSDOCK_API std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int size, const ThreadOptions& options = {});

/// Runs body(group) on `size` threads, one per rank, and waits for all of them. A rank that throws
/// or returns releases its peers. Returns what each rank threw (null: it returned normally).
CROSSDOCK_API std::vector<std::exception_ptr> try_ranks(int size,
                                                        const std::function<void(Group&)>& body,
                                                        const ThreadOptions& options = {});

/// As try_ranks, and then throws the error of the rank that failed first, if any.
CROSSDOCK_API void run_ranks(int size, const std::function<void(Group&)>& body,
                             const ThreadOptions& options = {});

}  // namespace crossdock
