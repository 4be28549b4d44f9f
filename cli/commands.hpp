#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

/// One function per command. Each returns the exit status: 0, or 1 for a failure it has reported.
/// Status 2 is for command-line arguments and belongs to main.cpp. Each argument by itself is known
/// (names) or in its range (numbers): command_line.cpp sees to that.
namespace crossdock::cli {

constexpr int kMaxRanks = 1024;                   // that the commands start
constexpr int64_t kMaxTokens = int64_t{1} << 31;  // of `run`, given in all or per rank

/// Arguments that are well-formed each, but cannot be together; main.cpp makes it status 2. Under
/// mpirun every process throws the same.
struct ArgumentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct InfoArgs {
  bool json = false;
};
int run_info(const InfoArgs& args);

struct EvalArgs {
  std::string path;    // "-": standard input
  bool check = false;  // compare with the reference, say so on standard error
};
int run_eval(const EvalArgs& args);

struct BenchArgs {
  bool list = false;
  bool json = false;
  bool check = true;
  std::vector<std::string> scenarios{};      // empty: the default ones
  std::vector<std::string> strategies{};     // empty: all
  std::vector<std::string> communicators{};  // empty: all that work here
  std::string device = "cpu";                // cuda: the scenarios of the GPU by default
  int ranks = 0;                             // 0: the scenario's
  int ranks_per_node = 0;                    // 0: as the engine reports
  int max_in_flight = 0;                     // with mpi; 0: its default
  std::optional<int> max_sms{};              // of a rank, with cuda; not given: the scenario's
  int repeat = 7;
  int warm_up = 2;
};
int run_bench(const BenchArgs& args);

struct RunArgs {
  std::string preset;             // a published model, scaled; empty: sizes as given
  std::optional<int> scale;       // divisor of the preset's widths; not given: as large as is quick
  std::optional<int64_t> tokens;  // per rank
  std::optional<int64_t> tokens_total;  // spread over the ranks
  std::optional<int64_t> width, inner, shared_inner, experts, top_k;
  std::string strategy = "auto";
  std::string communicator;  // "threads" or "mpi"; empty: mpi under mpirun, else threads
  std::optional<int> ranks;  // not given: 4; under mpirun the processes
  int ranks_per_node = 0;    // 0: as the engine reports
  int max_in_flight = 0;     // requests, with mpi; 0: the engine's default
  int64_t chunk_bytes = 0;   // of a request, with mpi; 0: the engine's default
  int64_t overlap = 1;       // chunks of a dispatch
  std::string dtype = "fp32";
  std::string activation;  // empty: the preset's, or swiglu
  std::string weights_in = "combine";
  int steps = 3;
  uint64_t seed = 1;
  bool forward_only = false;
  bool check = true;
  std::string trace;  // where a trace of the steps goes; empty: nowhere
  bool json = false;
  std::vector<std::string> words{};  // of the command line these came from, without the program
};
int run_run(const RunArgs& args);

struct PlanArgs {
  std::string model;  // a published model; empty: sizes as given
  std::optional<int64_t> width, inner, experts, top_k;
  std::optional<int64_t> sequence, micro_batch, tokens;
  std::string dtype = "bf16";
  int64_t nodes = 1;
  int64_t ranks_per_node = 8;
  int64_t tp = 1, cp = 1, pp = 1;
  std::optional<int64_t> ep;  // not given: all ranks of a pipeline stage
  int64_t alignment = 1;
  std::optional<double> capacity;
  bool partial_sums = false;
  double zipf = 0;
  std::string fabric = "h100-nvlink-400g";
  std::optional<double> within_rate, between_rate;  // GB/s
  std::optional<int64_t> queue_depth;
  std::optional<int> max_in_flight;
  bool json = false;
};
int run_plan(const PlanArgs& args);

struct VerifyArgs {
  bool list = false;
  bool json = false;
  bool quick = false;
  std::vector<std::string> strategies{};     // empty: all
  std::vector<std::string> communicators{};  // empty: all that work here
  std::vector<std::string> cases{};          // parts of names, or patterns; empty: all
  std::vector<std::string> dtypes{};         // empty: all
  std::vector<int> ranks{};                  // empty: 1, 2, 4, 7
  int ranks_per_node = 0;                    // 0: as the engine reports
  bool faults = false;                       // the fault matrix instead of the checks
  bool always_zero = false;                  // the report alone says whether checks failed
};
int run_verify(const VerifyArgs& args);
/// `--faults`: every fault at every step, on threads and MPI processes; prints the matrix with the
/// time from the point of the fault to the last survivor's error.
int run_verify_faults(const VerifyArgs& args);

}  // namespace crossdock::cli
