#include "cli/options.hpp"

#include <limits>

#include "cli/commands.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/extend/strategy_list.hpp"

namespace crossdock::cli {
namespace {

constexpr int64_t kMostCases = 1'000'000'000;
constexpr int64_t kLastFirstCase = std::numeric_limits<int64_t>::max() - 2 * kMostCases;

constexpr const char* kVerifyNotes =
    R"(Every check runs with every selected strategy, communicator and number of ranks;
results, including whole layers, are compared with the fp64 reference. The
command starts the processes of mpi and sockets itself; under mpirun, torchrun
or srun, their processes are the ranks.

Examples:
  crossdock verify --quick
  crossdock verify --strategy direct --communicator threads --case error
  crossdock verify --dtype bf16 --case 'routing/skewed/*'
  crossdock verify --faults --strategy direct --case stalls
  crossdock verify --random 5000
  crossdock verify --random 500 --seed 7 --communicator threads,sockets,mpi
  crossdock verify --device cuda --case layer --ranks 1,4
  mpirun -np 4 crossdock verify --quick)";

}  // namespace

void add_options(Options& options, VerifyArgs& args) {
  options.flag("--quick", args.quick, "Run only the quick checks");
  options.choices("--strategy", args.strategies, strategy_names(), "Strategies", "all");
  options.choices("--communicator", args.communicators, {"threads", "mpi", "sockets"},
                  "Communicators", "all that work here; on GPUs threads");
  options.whole_number("--ranks", args.ranks, {1, kMaxRanks},
                       "Numbers of ranks (default: 1,2,4,7)");
  options.choice("--device", args.device, {"cpu", "cuda"},
                 "Where rows move and layers compute; rank r uses GPU r modulo their number");
  options.list("--case", args.cases, "Checks whose names contain a text or match a pattern with *");
  options.choices("--dtype", args.dtypes, {"fp64", "fp32", "bf16", "fp16", "fp8_e4m3"},
                  "Only checks of these data types", "all");
  options.whole_number("--ranks-per-node", args.ranks_per_node, {0, kMaxRanks},
                       "Ranks per simulated node (default: real nodes)");
  options.flag("--faults", args.faults,
               "Instead of the checks, make one rank of four fail at every step");
  options.whole_number("--random", args.random, {1, kMostCases},
                       "Instead of the checks, judge this many random cases");
  options.whole_number("--seed", args.seed, {0, {}},
                       "Seed of the random cases (default: a new one, which is printed)");
  options.whole_number("--first", args.first, {0, kLastFirstCase},
                       "Number of the first random case (default: 0)");
  options.text("--output", "FOLDER", args.output,
               "Where files of failing random cases go (default: the current folder)");
  options.flag("--list", args.list, "List the names of the checks or faults without running them");
  options.flag("--json", args.json, "Print JSON");
  options.hidden_text("--case-file", args.case_file);      // for ranks that eval starts
  options.hidden_flag("--always-zero", args.always_zero);  // for ranks that verify starts
  options.notes(kVerifyNotes);
}

}  // namespace crossdock::cli
