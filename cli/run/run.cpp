#include <iostream>
#include <optional>

#include "bench/memory.hpp"
#include "cli/commands.hpp"
#include "cli/device/rank_device.hpp"
#include "cli/output_file.hpp"
#include "cli/processes/launch.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/run/job.hpp"
#include "cli/run/rank.hpp"
#include "cli/run/report.hpp"
#include "cli/text/log.hpp"
#include "cli/text/progress_line.hpp"
#include "cli/text/terminal.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {
namespace {

RunResult run_on_threads(const RunJob& job, const StepProgress& progress) {
  RunResult result;
  run_ranks(job.num_ranks,
            [&](Group& group) {
              RunResult own = run_rank(group, job, progress);
              if (group.rank() == 0) result = std::move(own);
            },
            {.ranks_per_node = job.ranks_per_node,
             .group = printing_options({.recorded_events = kRecordedEvents})});
  return result;
}

// The group of processes that this one belongs to; null if no launcher started it.
std::unique_ptr<Group> join_processes(const RunArgs& args) {
  const std::string communicator = launched_communicator(wanted_communicators(args));
  if (communicator.empty()) return nullptr;
  return std::make_unique<Group>(
      make_job_communicator(communicator, {.ranks_per_node = args.ranks_per_node,
                                           .max_in_flight = args.max_in_flight,
                                           .chunk_bytes = args.chunk_bytes}),
      printing_options({.recorded_events = kRecordedEvents}));
}

int start_processes(const RunArgs& args, const RunJob& job) {
  if (job.communicator == "mpi" && !mpi_is_built()) {
    throw Error(ErrorCode::kUnsupported, "communicator mpi: this build has no MPI");
  }
  return show_processes({.communicator = job.communicator,
                         .ranks = job.num_ranks,
                         .args = args.words,
                         .limit = kNoLimit});
}

// Minimum memory of all ranks together: parameters and gradients; x, grad_out, out and scores of
// every token; dispatched and hidden values of every row. In doubles, which cannot overflow.
double least_bytes(const RunJob& job) {
  const MoeLayerConfig& layer = job.layer;
  const auto tokens = static_cast<double>(job.tokens_total);
  const auto width = static_cast<double>(layer.router.width);
  const auto inner = static_cast<double>(layer.experts.inner);
  const auto num_experts = static_cast<double>(layer.router.num_experts);
  const double rows = tokens * static_cast<double>(layer.router.top_k);
  const double parameters = num_experts * width * (2 * inner + 1) +
                            job.num_ranks * 2 * width * static_cast<double>(layer.shared_inner);
  const double of_tokens = tokens * (3 * width + num_experts);
  const double of_rows = rows * (2 * width + 2 * inner);
  return static_cast<double>(size_of(job.dtype())) *
         ((job.with_backward ? 2 : 1) * parameters + of_tokens + of_rows);
}

void print(const RunArgs& args, const RunJob& job, const RunResult& result, const Origin& origin) {
  if (args.json) {
    std::cout << to_json(job, result, origin) << "\n" << std::flush;
  } else {
    std::cout << to_text(job, result, output_style()) << std::flush;
  }
}

}  // namespace

int run_run(const RunArgs& args) try {
  const std::unique_ptr<Group> processes = join_processes(args);
  const RunJob job = make_job(args, processes ? &processes->communicator() : nullptr);
  if (job.is_on_gpus()) prepare_gpus();
  if (!processes) {
    bench::check_memory("this layer", least_bytes(job), job.num_ranks);
    if (!job.trace_file.empty()) check_output_file(kTrace, job.trace_file);
    if (job.communicator != "threads") return start_processes(args, job);
  }
  const Origin origin = describe_origin(args.words);
  RunResult result;
  {
    const ProgressLine line;
    const StepProgress progress = [&](const std::string& words) { line.show(words); };
    result = processes ? run_rank(*processes, job, progress) : run_on_threads(job, progress);
  }
  if (!processes || processes->rank() == 0) print(args, job, result, origin);
  return !result.check || result.check->passed ? 0 : kFailure;
} catch (const std::bad_alloc&) {
  throw Error(ErrorCode::kCapacity,
              "there is not enough memory for this layer; choose a smaller one");
}

}  // namespace crossdock::cli
