#pragma once

#include "crossdock/extend/communicator.hpp"

namespace crossdock::cli {

/// Prints a long wait on standard error. Of the ranks that wait for the same rank, the lowest
/// speaks for all; if rank 0 does not start, each speaks for itself.
void print_wait_notice(const WaitNotice& notice);

}  // namespace crossdock::cli
