#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

/// The commands. Each has a function that adds its options, which check that names are known and
/// numbers in range, and one that runs it. The latter returns the exit status: 0, or 1 for a
/// failure that it has reported. Other failures are exceptions, which main.cpp reports.
namespace crossdock::cli {

class Options;

constexpr int kFailure = 1;       // the exit status
constexpr int kBadArguments = 2;  // the exit status; returned by main.cpp only
constexpr int kMaxRanks = 1024;   // limit on the ranks that a command starts

std::vector<std::string> model_names();

/// Arguments that contradict each other; main.cpp returns status 2. In a job of processes every
/// process throws the same error.
struct ArgumentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct InfoArgs {
  bool json = false;
};
void add_options(Options& options, InfoArgs& args);
int run_info(const InfoArgs& args);

struct EvalArgs {
  std::string path;          // "-": standard input
  std::string communicator;  // "threads", "sockets" or "mpi"; empty: the case's
  bool check = false;        // compare with the reference, report on standard error
  bool json = false;         // changes nothing: the output is always JSON
  bool as_rank = false;      // this process is a rank that eval has started
};
void add_options(Options& options, EvalArgs& args);
int run_eval(const EvalArgs& args);

struct BenchArgs {
  bool list = false;
  bool json = false;   // only the results, without the description of --format json
  std::string format;  // "table", "csv", "markdown" or "json"; empty: table
  bool check = true;
  std::vector<std::string> scenarios{};      // empty: the default ones
  std::vector<std::string> strategies{};     // empty: all
  std::vector<std::string> communicators{};  // empty: threads, and mpi if it works here
  std::string device = "cpu";                // cuda: run the GPU scenarios by default
  // Numbers and ranges; empty: the scenario's.
  std::vector<std::string> ranks{}, tokens{}, width{}, experts{}, top_k{};
  std::vector<std::string> dtypes{};  // empty: the scenario's
  int ranks_per_node = 0;             // 0: as the communicator reports
  int max_in_flight = 0;              // with mpi; 0: its default
  std::optional<int> max_sms{};       // per rank, with cuda; not given: the scenario's
  std::string copies = "auto";        // with cuda
  int repeat = 7;
  int warm_up = 2;
  std::vector<std::string> words{};  // the whole command line, without the program's name
};
void add_options(Options& options, BenchArgs& args);
int run_bench(const BenchArgs& args);

struct RunArgs {
  std::string preset;             // a published model, scaled; empty: sizes as given
  std::optional<int> scale;       // divisor of the preset's widths; not given: chosen to be fast
  std::optional<int64_t> tokens;  // per rank
  std::optional<int64_t> tokens_total;  // spread over the ranks
  std::optional<int64_t> width, inner, shared_inner, experts, top_k;
  std::string strategy = "auto";
  std::string communicator;    // empty: the job's, or threads if there is no job
  std::optional<int> ranks;    // not given: 4, or the number of processes in the job
  int ranks_per_node = 0;      // 0: as the communicator reports
  int max_in_flight = 0;       // requests, with mpi; 0: the communicator's default
  int64_t chunk_bytes = 0;     // per request, with mpi; 0: the communicator's default
  int64_t overlap = 1;         // chunks of a dispatch
  int overlap_sms = 0;         // SMs for a dispatch that overlaps experts, with cuda; 0: no limit
  std::string device = "cpu";  // or "cuda"
  std::string dtype = "fp32";
  std::string activation;  // empty: the preset's, or swiglu
  std::string weights_in = "combine";
  int steps = 3;
  uint64_t seed = 1;
  bool forward_only = false;
  bool check = true;
  std::string trace;  // file for a trace of the steps; empty: none
  bool json = false;
  std::vector<std::string> words{};  // the whole command line, without the program's name
};
void add_options(Options& options, RunArgs& args);
inline std::vector<std::string> wanted_communicators(const RunArgs& args) {
  return args.communicator.empty() ? std::vector<std::string>{} : std::vector{args.communicator};
}
int run_run(const RunArgs& args);

struct PlanArgs {
  std::string model;   // a published model; empty: sizes as given
  std::string config;  // file with a model's configuration, instead
  std::optional<int64_t> width, inner, experts, top_k;
  std::optional<int64_t> sequence, micro_batch, tokens;
  std::string dtype = "bf16";
  int64_t nodes = 1;
  int64_t ranks_per_node = 8;
  int64_t tp = 1, cp = 1, pp = 1;
  std::optional<int64_t> ep;  // not given: all ranks of a pipeline stage
  int64_t alignment = 1;
  std::optional<double> capacity;
  std::string partial_sums = "none";
  std::string copies = "auto";
  double zipf = 0;
  std::string fabric = "h100-nvlink-400g";
  std::optional<double> within_rate, between_rate;  // GB/s
  std::optional<double> memory;                     // GB per rank
  std::optional<int64_t> queue_depth;
  std::optional<int> max_in_flight;
  bool queue = false;  // show what schemes with queue entries per token need
  bool json = false;
};
void add_options(Options& options, PlanArgs& args);
int run_plan(const PlanArgs& args);

struct MeshArgs {
  std::optional<int64_t> world, tp, cp, dp, pp, etp, ep, edp;  // not given: derived
  std::optional<int> rank;                                     // show only its groups
  bool json = false;
};
void add_options(Options& options, MeshArgs& args);
int run_mesh(const MeshArgs& args);

struct VerifyArgs {
  bool list = false;
  bool json = false;
  bool quick = false;
  std::vector<std::string> strategies{};     // empty: all
  std::vector<std::string> communicators{};  // empty: all that work here
  std::vector<std::string> cases{};          // parts of names or patterns; empty: all
  std::vector<std::string> dtypes{};         // empty: all
  std::string device = "cpu";                // or "cuda"
  std::vector<int> ranks{};                  // empty: 1, 2, 4, 7
  int ranks_per_node = 0;                    // 0: as the communicator reports
  bool faults = false;                       // run the fault matrix instead of the checks
  bool always_zero = false;                  // exit with status 0 even if checks failed
  std::optional<int64_t> random{};           // run so many random cases instead of the checks
  std::optional<uint64_t> seed{};            // of the random cases; not given: a new one
  std::optional<int64_t> first{};            // number of the first random case; not given: 0
  std::string output;                        // folder for files of failing cases; empty: this one
  std::string case_file;                     // run this case, for processes that eval starts
};
void add_options(Options& options, VerifyArgs& args);
int run_verify(const VerifyArgs& args);
/// `--faults`: causes every fault at every step, on threads and processes, and prints the time from
/// each fault to the last survivor's error.
int run_verify_faults(const VerifyArgs& args);
/// `--random`: judges random cases, and writes a file for each that fails.
int run_verify_random(const VerifyArgs& args);
int run_verify_case_file(const VerifyArgs& args);

}  // namespace crossdock::cli
