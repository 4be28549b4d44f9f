#pragma once

#include <cstdint>

namespace crossdock {

/// Number of forks between the process that loaded the library and this one. It differs between the
/// process that made an object and a forked child, whose copy of the object must do nothing: its
/// threads do not exist there, and its peers and shared memory belong to the parent.
uint64_t fork_generation() noexcept;

}  // namespace crossdock
