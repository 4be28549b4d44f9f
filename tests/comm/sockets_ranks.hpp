#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "comm/group_runner.hpp"
#include "crossdock/sockets.hpp"

namespace crossdock::testing {

/// Listens on the loopback address; several chunks and windows for the larger blocks of the tests.
SocketsOptions local_options();

/// Runs body on `size` ranks that have joined each other. Here the ranks are threads, each with its
/// own bootstrap.
void run_threads(int size, const SocketsOptions& options,
                 const std::function<void(Communicator&)>& body);

/// Sends block_bytes to every rank and checks what arrives.
void exchange(Communicator& communicator, int64_t block_bytes,
              std::chrono::nanoseconds deadline = kAmple);

}  // namespace crossdock::testing
