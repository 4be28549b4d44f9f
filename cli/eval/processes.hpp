#pragma once

#include <functional>

#include "cli/eval/case.hpp"
#include "cli/eval/run.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cli {

/// Runs `body` as every rank of a group of processes with the sockets communicator: this process is
/// rank 0 and forks the others. Throws what `body` throws here. REQUIRES: this process has one
/// thread.
void run_on_processes(int size, int ranks_per_node, const std::function<void(Group&)>& body);

/// Like run_case, on processes (see run_on_processes).
EvalResult run_case_on_processes(const EvalCase& eval_case);

}  // namespace crossdock::cli
