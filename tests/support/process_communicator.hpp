#pragma once

#include <memory>

#include "crossdock/extend/communicator.hpp"

namespace crossdock::testing {

/// A new communicator of the processes that run this test. Collective. Tests of processes are
/// written once; process_communicator_<name>.cpp defines this for each kind of process.
/// `ranks_per_node`: ranks per simulated node; 0: the actual nodes.
std::unique_ptr<Communicator> make_process_communicator(int ranks_per_node = 0);

}  // namespace crossdock::testing
