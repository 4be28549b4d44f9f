#pragma once

#include "cli/eval/case.hpp"
#include "cli/eval/run.hpp"

namespace crossdock::cli {

/// Like run_case, with ranks as processes of the sockets communicator: this process is rank 0 and
/// forks the others. REQUIRES: this process has one thread.
EvalResult run_case_on_processes(const EvalCase& eval_case);

}  // namespace crossdock::cli
