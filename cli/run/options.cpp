#include "cli/options.hpp"

#include "cli/commands.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/extend/strategy.hpp"
#include "crossdock/extend/strategy_list.hpp"

namespace crossdock::cli {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 31;  // in all or per rank

constexpr const char* kRunNotes =
    R"(Tokens and parameters depend only on the seed: the same total number of tokens
gives the same checksum for any number of ranks, strategy and communicator.

Examples:
  crossdock run --preset deepseek-v3 --strategy direct
  crossdock run --tokens-total 4096 --experts 64 --top-k 8 --ranks 1
  crossdock run --communicator mpi --ranks 4 --overlap 4 --trace trace.json
  crossdock run --device cuda --dtype bf16 --preset qwen3-30b-a3b --scale 1
  mpirun -np 4 crossdock run --tokens-total 4096 --json
  torchrun --nproc-per-node 4 --no-python crossdock run
  srun --ntasks 4 crossdock run)";

void add_layer(Options& options, RunArgs& args) {
  options.choice("--preset,--model", args.preset, model_names(),
                 "Published model, with its widths scaled down");
  options.whole_number(
      "--scale", args.scale, {1},
      "Divisor of the preset's widths; 1: full size (default: chosen for a fast run)");
  options.whole_number("--tokens", args.tokens, {0, kMaxTokens}, "Tokens per rank (default: 512)");
  options.whole_number("--tokens-total", args.tokens_total, {0, kMaxTokens},
                       "Tokens in total, spread over the ranks");
  options.whole_number("--width", args.width, {1}, "Token width (default: 512)");
  options.whole_number("--inner", args.inner, {1}, "Inner width of an expert (default: 256)");
  options.whole_number("--shared-inner", args.shared_inner, {0},
                       "Inner width of the shared experts (default: no shared experts)");
  options.whole_number("--experts", args.experts, {1}, "Number of experts (default: 32)");
  options.whole_number("--top-k", args.top_k, {1}, "Experts per token (default: 4)");
  options.choice("--device", args.device, {"cpu", "cuda"},
                 "Where ranks compute; rank r uses GPU r modulo their number");
  options.choice("--dtype", args.dtype, {"fp64", "fp32", "bf16", "fp16"},
                 "Data type of tokens and parameters");
  options.choice("--activation", args.activation,
                 {std::begin(kActivationNames), std::end(kActivationNames)},
                 "Activation of the experts", "the preset's, or swiglu");
  options.choice("--weights-in", args.weights_in, {"combine", "experts"},
                 "Where the routing weights are applied");
}

}  // namespace

void add_options(Options& options, RunArgs& args) {
  add_layer(options, args);
  std::vector<std::string> strategies = strategy_names();
  strategies.emplace_back("auto");
  options.choice("--strategy", args.strategy, strategies, "How rows are moved");
  options.choice("--communicator", args.communicator, {"threads", "mpi", "sockets"},
                 "How ranks communicate; mpi and sockets start processes if needed",
                 "threads; mpi under mpirun; sockets under torchrun or srun");
  options.whole_number("--ranks", args.ranks, {1, kMaxRanks},
                       "Number of ranks (default: 4, or the processes of the job)");
  options.whole_number("--ranks-per-node", args.ranks_per_node, {0, kMaxRanks},
                       "Ranks per simulated node (default: real nodes)");
  options.whole_number("--max-in-flight", args.max_in_flight, {2},
                       "Requests in flight per rank, with mpi (default: 128)");
  options.whole_number("--chunk-bytes", args.chunk_bytes, {1},
                       "Largest message, with mpi (default: 4194304)");
  options.whole_number("--overlap", args.overlap, {1},
                       "Chunks of a dispatch; experts compute one chunk while the next is moved");
  options.whole_number(
      "--overlap-sms", args.overlap_sms, {0},
      "Multiprocessors for a dispatch that overlaps experts, with cuda; 0: no limit");
  options.whole_number("--steps", args.steps, {1}, "Number of steps to run");
  options.whole_number("--seed", args.seed, {0}, "Seed of tokens and parameters");
  options.flag("--forward-only", args.forward_only, "Skip the backward pass");
  options.flag_off("--no-check", args.check,
                   "Do not compare a sample with the fp64 reference; by default a difference exits "
                   "with status 1");
  options.text("--trace", "FILE", args.trace, "Write a trace of all steps, for Perfetto");
  options.flag("--json", args.json, "Print JSON");
  options.notes(kRunNotes);
}

}  // namespace crossdock::cli
