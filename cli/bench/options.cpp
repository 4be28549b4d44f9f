#include "cli/options.hpp"

#include "cli/commands.hpp"
#include "crossdock/plan.hpp"

namespace crossdock::cli {
namespace {

constexpr const char* kBenchNotes =
    R"(For each step: median, minimum and maximum time of the slowest rank; GB/s,
counting only bytes that the step must read or write; and the median relative to
  copy     a parallel memcpy that reads and writes as many bytes,
  traffic  a parallel loop that reads as much and writes as much as the step,
  floor    on a GPU: the time that memory needs for the bytes, or tensor cores
           for the flops of layer-* and grouped-*, whichever is longer.
Ranks share the available GPUs: rank r uses GPU r modulo their number. With
several GPUs also: GB/s over the link of the busiest GPU, in one direction, and
its share of the rate that copies between all GPUs at once reach.
A size takes a number, a range or a list of both: 128:1024:x2 is 128, 256, 512
and 1024, 64:200:+64 is 64, 128 and 192. Several sizes run in all combinations,
at most 1000, and tables then have a line per size and a column per step.
The command starts the processes of mpi and sockets itself; under mpirun,
torchrun or srun, their processes are the ranks.

Examples:
  crossdock bench --list
  crossdock bench --scenario cpu-large --strategy direct,alltoall --json
  crossdock bench --scenario 'scale-*' --communicator threads
  crossdock bench --device cuda --scenario layer-qwen3,'grouped-*'
  crossdock bench --tokens 128:8192:x2 --width 7168 --experts 256 --top-k 8 \
    --dtype bf16 --device cuda --ranks 8
  crossdock bench --tokens 64:4096:x4 --ranks 2,4 --strategy direct --format csv
  mpirun -np 4 crossdock bench --scenario cpu-medium)";

}  // namespace

void add_options(Options& options, BenchArgs& args) {
  options.flag("--list", args.list, "List the scenarios");
  options.list("--scenario", args.scenarios,
               "Names, or prefixes followed by *, of scenarios on --device (default: on the CPU "
               "those that --list marks with *)");
  options.list("--strategy", args.strategies, "Strategies, or anchor-mpi-pack (default: all)");
  options.choices("--communicator", args.communicators, {"threads", "mpi", "sockets"},
                  "Communicators", "threads, and on the CPU mpi if it works here");
  options.choice(
      "--device", args.device, {"cpu", "cuda"},
      "Device of the scenarios, also of your own sizes; without either: h200-* with cuda");
  options.list("--tokens", args.tokens,
               "Tokens per rank. This and the sizes below replace those of --scenario; without it "
               "they make a scenario of their own");
  options.list("--width", args.width, "Values per token");
  options.list("--experts", args.experts, "Number of experts");
  options.list("--top-k", args.top_k, "Experts per token");
  options.choices("--dtype", args.dtypes, {"fp32", "bf16", "fp16"}, "Types of tokens",
                  "the scenario's");
  options.list("--ranks", args.ranks, "Number of ranks (default: the scenario's)");
  options.whole_number("--ranks-per-node", args.ranks_per_node, {0, kMaxRanks},
                       "Ranks per simulated node (default: real nodes)");
  options.whole_number("--max-in-flight", args.max_in_flight, {2},
                       "Requests in flight per rank, with mpi (default: 128)");
  options.whole_number("--max-sms", args.max_sms, {0},
                       "Multiprocessors per rank on a GPU; 0: no limit (default: the scenario's)");
  options.choice("--copies", args.copies, {kCopiesNames.begin(), kCopiesNames.end()},
                 "Copies of a token that GPU ranks send each other; auto: per rank if they are "
                 "on several GPUs");
  options.whole_number("--repeat", args.repeat, {1}, "Timed repetitions");
  options.whole_number("--warm-up", args.warm_up, {0}, "Repetitions before the timed ones");
  options.flag_off("--no-check", args.check, "Do not compare results with the expected bits");
  options.choice("--format", args.format, {"table", "csv", "markdown", "json"},
                 "Format of the results, after a description of the run", "table");
  options.flag("--json", args.json, "Print only the results, as JSON");
  options.notes(kBenchNotes);
}

}  // namespace crossdock::cli
