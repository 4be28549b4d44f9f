#pragma once

#include <string>

#include "cli/eval/case.hpp"
#include "cli/eval/run.hpp"

namespace crossdock::cli {

/// Like run_case, with ranks as processes of the case's communicator, which read the case from
/// `path`; "-": from a file in memory with `text`.
EvalResult run_case_on_processes(const EvalCase& eval_case, const std::string& path,
                                 const std::string& text);

/// One of these processes, in the job of this communicator. Rank 0 prints the results for the
/// other end of run_case_on_processes. Collective.
void run_case_as_rank(const EvalCase& eval_case, const std::string& job);

}  // namespace crossdock::cli
