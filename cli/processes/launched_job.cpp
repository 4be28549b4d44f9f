#include "cli/processes/launched_job.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "cli/commands.hpp"
#include "cli/text/wait_notice.hpp"
#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "crossdock/mpi.hpp"
#include "crossdock/sockets.hpp"

namespace crossdock::cli {
namespace {

constexpr std::chrono::seconds kSpeakerDeadline{10};

bool contains(const std::vector<std::string>& names, const char* name) {
  return std::ranges::find(names, name) != names.end();
}

bool is_set(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0';
}

// RANK without WORLD_SIZE is some other program's variable, unless sockets were requested. With
// both, an invalid value is an error: otherwise every process of the job would run the whole job.
bool sockets_are_launched(bool are_wanted) {
  try {
    return sockets_launch_from_environment().has_value();
  } catch (const Error&) {
    if (are_wanted || is_set("WORLD_SIZE")) throw;
    return false;
  }
}

// The job that this process speaks for.
struct Speaker {
  std::unique_ptr<Communicator> job;  // kept until exit
  std::string description;
};

Speaker& speaker() {
  static Speaker one;
  return one;
}

std::string describe(const Communicator& job) {
  std::string words = "rank " + std::to_string(job.rank()) + " of " + std::to_string(job.size()) +
                      ", nodes: " + std::to_string(job.topology().num_nodes);
  if (!job.note().empty()) words += "; " + job.note();
  return words;
}

// Rank 0 takes part in no exchange, so this exchange ends when rank 0's process does.
void wait_for_end_of_rank_0(std::unique_ptr<Communicator> job) {
  try {
    Group(std::move(job)).agree({.operation = "end"});
  } catch (const Error&) {
    // Rank 0 has ended, or takes too long.
  }
}

}  // namespace

std::string launched_communicator(const std::vector<std::string>& wanted) {
  const bool wants_sockets = contains(wanted, "sockets");
  if (wants_sockets && sockets_are_launched(true)) return "sockets";
  if (mpi_is_launched()) return "mpi";
  return wanted.empty() && sockets_are_launched(false) ? "sockets" : "";
}

int rank_in_job(const std::string& communicator) {
  if (communicator == "sockets") {
    const auto launch = sockets_launch_from_environment();
    return launch ? launch->rank : -1;
  }
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    if (is_set(variable)) return std::atoi(std::getenv(variable));
  }
  return -1;
}

std::string note_on_environment(const std::vector<std::string>& wanted) {
  if (!wanted.empty() || !launched_communicator(wanted).empty()) return "";
  for (const auto& [set, unset] : {std::pair{"RANK", "WORLD_SIZE"}, {"WORLD_SIZE", "RANK"}}) {
    if (!is_set(set) || is_set(unset)) continue;
    return std::string(set) + " is set but " + unset +
           " is not, so this process is not a rank of a job; its ranks are threads "
           "(--communicator threads says the same without this note)";
  }
  return "";
}

std::unique_ptr<Communicator> make_job_communicator(const std::string& communicator,
                                                    const JobOptions& options) {
  if (communicator == "sockets") {
    return make_sockets_communicator(SocketsOptions{.ranks_per_node = options.ranks_per_node,
                                                    .setup_deadline = options.setup_deadline,
                                                    .on_wait = print_wait_notice});
  }
  MpiOptions mpi{.ranks_per_node = options.ranks_per_node,
                 .setup_deadline = options.setup_deadline,
                 .on_wait = print_wait_notice};
  if (options.max_in_flight > 0) mpi.max_in_flight = options.max_in_flight;
  if (options.chunk_bytes > 0) mpi.chunk_bytes = options.chunk_bytes;
  return make_mpi_communicator(mpi);
}

bool speaks_for_job(const std::string& communicator) {
  if (communicator.empty() || (communicator == "mpi" && !mpi_is_built())) return true;
  Speaker& own = speaker();
  std::unique_ptr<Communicator> job;
  try {
    job = make_job_communicator(communicator, {.setup_deadline = kSpeakerDeadline});
  } catch (const Error&) {
    return true;  // the others did not arrive; better to print twice than not at all
  }
  const bool is_speaker = job->rank() == 0;
  if (is_speaker) own.description = describe(*job);
  if (communicator == "mpi") return is_speaker;  // MPI processes wait for each other at exit
  if (is_speaker) {
    own.job = std::move(job);
  } else {
    wait_for_end_of_rank_0(std::move(job));
  }
  return is_speaker;
}

const std::string& job_description() {
  return speaker().description;
}

void check_same_words(const std::string& communicator, const std::vector<std::string>& words,
                      std::optional<std::chrono::nanoseconds> setup_deadline) {
  if (communicator.empty() || (communicator == "mpi" && !mpi_is_built())) return;
  std::string own;
  for (const std::string& word : words) own += " " + word;
  Group group(make_job_communicator(communicator, {.setup_deadline = setup_deadline}),
              {.on_wait = print_wait_notice});
  const Agreement all =
      group.agree({.operation = "command_line", .body = std::as_bytes(std::span(own))});
  const auto words_of = [&all](int rank) {
    const auto body = all.body(rank);
    return std::string(reinterpret_cast<const char*>(body.data()), body.size());
  };
  for (int rank = 1; rank < group.size(); ++rank) {
    if (words_of(rank) == words_of(0)) continue;
    throw ArgumentError(
        "every process of the job must have the same arguments; rank 0 has `crossdock" +
        words_of(0) + "`, rank " + std::to_string(rank) + " has `crossdock" + words_of(rank) + "`");
  }
}

void check_against_job(const Communicator& job, const std::vector<std::string>& communicators,
                       const std::vector<int>& ranks) {
  const bool is_mpi = job.name() == "mpi";
  if (contains(communicators, "threads")) {
    throw ArgumentError(
        is_mpi ? "under mpirun the processes are the ranks; for threads, run the command without "
                 "mpirun"
               : "the processes of this job are the ranks; give --communicator threads alone");
  }
  if (is_mpi && contains(communicators, "sockets")) {
    throw ArgumentError(
        "communicator sockets needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which mpirun "
        "does not set; run the command without mpirun");
  }
  if (!is_mpi && contains(communicators, "mpi")) {
    throw ArgumentError("mpirun did not start this job, so its communicator is sockets, not mpi");
  }
  const int num_processes = job.size();
  if (!ranks.empty() && ranks != std::vector<int>{num_processes}) {
    throw ArgumentError("--ranks must be the number of processes, " +
                        std::to_string(num_processes) + ", or be omitted " +
                        (is_mpi ? "under mpirun" : "in a job of processes"));
  }
}

}  // namespace crossdock::cli
