#include "cli/command_line.hpp"

#include <CLI/CLI.hpp>
#include <sstream>

#include "cli/option_checks.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/planner.hpp"

namespace crossdock::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  crossdock run --preset qwen3-30b-a3b          a whole layer on 4 ranks, forward and backward, checked
  crossdock verify --quick                      judge every strategy on every engine
  crossdock info                                what is built in and what works on this machine
  crossdock eval examples/cases/demo.json       run a case, print rows, outputs and gradients
  crossdock eval --check - < case.json          the same from standard input, checked
  crossdock bench --scenario cpu-large          measure strategies and engines beside a copy
  crossdock plan --model deepseek-v3 --seq 4096 --nodes 4      what a job needs, before it starts

Exit status: 0, or 1 if a command failed, or 2 for bad command-line arguments.)";

constexpr const char* kEvalNotes =
    R"(The result is one JSON object on standard output. If anything is wrong with the case, that is
{"error": message} alone, and the exit status is 1. docs/case_format.md describes both.

Examples:
  crossdock eval examples/cases/demo.json
  crossdock eval --check examples/cases/demo.json > result.json)";

constexpr const char* kBenchNotes =
    R"(Per step: median, least and largest time of the slowest rank; bytes that must be read and written at
least; the time of a plain parallel memcpy that reads and writes as many ("copy"), and of a plain
parallel loop that reads and writes just as much as the step, each by itself ("traffic"); and the
step's ratio to both. Without mpirun, MPI ranks are started by it; under mpirun its processes are
the ranks.

Examples:
  crossdock bench --list
  crossdock bench --scenario cpu-large --strategy direct,alltoall --json
  crossdock bench --scenario 'scale-*' --communicator threads
  mpirun -np 4 crossdock bench --scenario cpu-medium)";

constexpr const char* kRunNotes =
    R"(Tokens and parameters depend on the seed alone, so that the same tokens in all give the same
checksum for any number of ranks, any strategy and either engine.

Examples:
  crossdock run --preset deepseek-v3 --strategy direct
  crossdock run --tokens-total 4096 --width 1024 --inner 512 --experts 64 --top-k 8 --ranks 1
  crossdock run --communicator mpi --ranks 4 --overlap 4 --trace trace.json
  mpirun -np 4 crossdock run --tokens-total 4096 --json)";

constexpr const char* kPlanNotes =
    R"(Rates, memory and queue depth are those of the fabric, per rank. docs/planner.md says what is computed
and how. A job that cannot be is exit status 1; the message names the limit and the largest legal value.

Examples:
  crossdock plan --model qwen3-30b-a3b --seq 8192 --micro-batch 8 --nodes 2
  crossdock plan --model deepseek-v3 --tokens 4096 --nodes 8 --ep 32 --zipf 0.5 --capacity 1.25
  crossdock plan --width 2048 --experts 64 --top-k 8 --tokens 8192 --fabric ethernet --json)";

constexpr const char* kVerifyNotes =
    R"(Every check runs on every strategy, engine and number of ranks that is chosen; the fp64 reference
judges. Without mpirun, MPI ranks are started by it; under mpirun its processes are the ranks.

Examples:
  crossdock verify --quick
  crossdock verify --strategy direct --communicator threads --ranks 4 --case error
  crossdock verify --dtype bf16 --case 'routing/skewed/*'
  crossdock verify --faults --strategy direct --case stalls
  mpirun -np 4 crossdock verify --quick)";

template <typename Presets>
std::vector<std::string> names_of(const Presets& presets) {
  std::vector<std::string> names;
  names.reserve(std::size(presets));
  for (const auto& preset : presets) names.emplace_back(preset.name);
  return names;
}

std::vector<std::string> strategies_and_auto() {
  std::vector<std::string> names = strategy_names();
  names.emplace_back("auto");
  return names;
}

void add_layer_of_run(CLI::App& run, RunArgs& args) {
  run.add_option("--preset,--model", args.preset, "A published model, its widths made smaller")
      ->check(one_of(names_of(kModelPresets)));
  run.add_option("--scale", args.scale, "Divide the preset's widths by this; 1: full size")
      ->transform(whole_number(1, kInt));
  run.add_option("--tokens", args.tokens, "Tokens per rank (512)")
      ->transform(whole_number(0, kMaxTokens));
  run.add_option("--tokens-total", args.tokens_total, "Tokens in all, spread over the ranks")
      ->transform(whole_number(0, kMaxTokens));
  run.add_option("--width", args.width, "Token width (512)")->transform(whole_number(1, kLong));
  run.add_option("--inner", args.inner, "Inner width of an expert (256)")
      ->transform(whole_number(1, kLong));
  run.add_option("--shared-inner", args.shared_inner, "Inner width of the shared experts (0: none)")
      ->transform(whole_number(0, kLong));
  run.add_option("--experts", args.experts, "Experts in all (32)")
      ->transform(whole_number(1, kLong));
  run.add_option("--top-k", args.top_k, "Experts per token (4)")->transform(whole_number(1, kLong));
  run.add_option("--dtype", args.dtype, "Of tokens and parameters")
      ->check(one_of({"fp64", "fp32", "bf16", "fp16"}))
      ->capture_default_str();
  run.add_option("--activation", args.activation, "Of the experts (swiglu, or the preset's)")
      ->check(one_of({std::begin(kActivationNames), std::end(kActivationNames)}));
  run.add_option("--weights-in", args.weights_in, "Where the routes' weights are applied")
      ->check(one_of({"combine", "experts"}))
      ->capture_default_str();
}

void add_run(CLI::App& app, RunArgs& args) {
  CLI::App* run = app.add_subcommand("run", "Run a MoE layer on some ranks, timed and checked");
  add_layer_of_run(*run, args);
  run->add_option("--strategy", args.strategy, "How rows travel")
      ->check(one_of(strategies_and_auto()))
      ->capture_default_str();
  run->add_option("--communicator", args.communicator,
                  "The engine: threads, or mpi, which is chosen under mpirun and else starts it")
      ->check(one_of({"threads", "mpi"}));
  run->add_option("--ranks", args.ranks, "Ranks (4; under mpirun its processes)")
      ->transform(whole_number(1, kMaxRanks));
  run->add_option("--ranks-per-node", args.ranks_per_node, "Treat every so many ranks as a node")
      ->transform(whole_number(0, kMaxRanks));
  run->add_option("--max-in-flight", args.max_in_flight,
                  "Requests in flight at a rank, with mpi (128)")
      ->transform(whole_number(2, kInt));
  run->add_option("--chunk-bytes", args.chunk_bytes, "Largest message, with mpi (4194304)")
      ->transform(whole_number(1, kLong));
  run->add_option("--overlap", args.overlap,
                  "Dispatch in so many chunks of local experts, which compute meanwhile")
      ->transform(whole_number(1, kLong))
      ->capture_default_str();
  run->add_option("--steps", args.steps, "How often")
      ->transform(whole_number(1, kInt))
      ->capture_default_str();
  run->add_option("--seed", args.seed, "Of tokens and parameters")
      ->transform(whole_number(0, kLong))
      ->capture_default_str();
  run->add_flag("--forward-only", args.forward_only, "No backward");
  run->add_flag_callback(
      "--no-check", [&args] { args.check = false; },
      "Do not compare a sample with the fp64 reference; without this a difference is exit status "
      "1");
  run->add_option("--trace", args.trace, "Write a trace of all steps to this file, for Perfetto");
  run->add_flag("--json", args.json, "Print JSON");
  run->footer(kRunNotes);
}

void add_verify(CLI::App& app, VerifyArgs& args) {
  CLI::App* verify = app.add_subcommand("verify", "Judge strategies and engines by the reference");
  verify->add_flag("--quick", args.quick, "A part of the checks, the quick ones");
  verify->add_option("--strategy", args.strategies, "Names (all)")
      ->delimiter(',')
      ->check(one_of(strategy_names()));
  verify->add_option("--communicator", args.communicators, "Engines (those that work here)")
      ->delimiter(',')
      ->check(one_of({"threads", "mpi"}));
  verify->add_option("--ranks", args.ranks, "Numbers of ranks (1,2,4,7)")
      ->delimiter(',')
      ->transform(whole_number(1, kMaxRanks));
  verify->add_option("--case", args.cases, "Parts of names of checks, or patterns with *")
      ->delimiter(',');
  verify->add_option("--dtype", args.dtypes, "Checks of these dtypes alone")
      ->delimiter(',')
      ->check(one_of({"fp64", "fp32", "bf16", "fp16", "fp8_e4m3"}));
  verify->add_option("--ranks-per-node", args.ranks_per_node, "Treat every so many ranks as a node")
      ->transform(whole_number(0, kMaxRanks));
  verify->add_flag("--faults", args.faults,
                   "Put faults into one rank of four at every step instead");
  verify->add_flag("--list", args.list, "Name the checks, or faults, and run none");
  verify->add_flag("--json", args.json, "Print JSON");
  verify->add_flag("--always-zero", args.always_zero)->group("");  // for ranks it starts itself
  verify->footer(kVerifyNotes);
}

void add_eval(CLI::App& app, EvalArgs& args) {
  CLI::App* eval = app.add_subcommand("eval", "Run a small explicit case and print all results");
  eval->add_option("CASE", args.path, "File with the case as JSON; - for standard input")
      ->required();
  eval->add_flag("--check", args.check,
                 "Compare with the fp64 reference and say so on standard error; a difference is "
                 "exit status 1");
  eval->footer(kEvalNotes);
}

void add_mesh_of_plan(CLI::App& plan, PlanArgs& args) {
  const auto add = [&plan](const char* name, int64_t& value, const char* words) {
    plan.add_option(name, value, words)->transform(whole_number(1, kLong))->capture_default_str();
  };
  add("--nodes", args.nodes, "Nodes");
  add("--ranks-per-node", args.ranks_per_node, "Ranks of a node");
  add("--tp", args.tp, "Tensor parallel: ranks that share a sequence");
  add("--cp", args.cp, "Context parallel, likewise");
  add("--pp", args.pp, "Pipeline stages");
  plan.add_option("--ep", args.ep, "Ranks that share the experts (all of a stage)")
      ->transform(whole_number(1, kLong));
}

void add_plan(CLI::App& app, PlanArgs& args) {
  CLI::App* plan = app.add_subcommand("plan", "What a job needs, before it starts");
  const auto add_size = [plan](const char* name, std::optional<int64_t>& size, const char* words) {
    plan->add_option(name, size, words)->transform(whole_number(1, kLong));
  };
  const auto add_number = [plan](const char* name, auto& value, const char* words) {
    return plan->add_option(name, value, words)->check(number());
  };
  plan->add_option("--model,--preset", args.model, "A published model")
      ->check(one_of(names_of(kModelPresets)));
  add_size("--width", args.width, "Token width");
  add_size("--inner", args.inner, "Inner width of an expert");
  add_size("--experts", args.experts, "Experts in all");
  add_size("--top-k", args.top_k, "Experts per token");
  add_size("--seq", args.sequence, "Sequence length");
  add_size("--micro-batch", args.micro_batch, "Sequences of a micro-batch (1)");
  plan->add_option("--tokens", args.tokens, "Tokens per rank, in place of --seq and --micro-batch")
      ->transform(whole_number(0, kLong));
  plan->add_option("--dtype", args.dtype, "Of tokens; fp8 travels with its scales")
      ->check(one_of({"fp64", "fp32", "bf16", "fp16", "fp8_e4m3"}))
      ->capture_default_str();
  add_mesh_of_plan(*plan, args);
  plan->add_option("--alignment", args.alignment, "Rows of an expert begin at multiples of this")
      ->transform(whole_number(1, kLong))
      ->capture_default_str();
  add_number("--capacity", args.capacity, "Capacity factor");
  plan->add_flag("--partial-sums", args.partial_sums, "Combine sums before rows travel home");
  add_number("--zipf", args.zipf, "Skew: expert e is drawn with weight (e + 1)^-zipf")
      ->capture_default_str();
  plan->add_option("--fabric", args.fabric, "Links and memory")
      ->check(one_of(names_of(kFabricPresets)))
      ->capture_default_str();
  add_number("--within-rate", args.within_rate, "GB/s of a rank inside its node, one way");
  add_number("--between-rate", args.between_rate, "GB/s of a rank to other nodes, one way");
  add_size("--queue-depth", args.queue_depth, "Entries of a send queue at most (65535)");
  plan->add_option("--max-in-flight", args.max_in_flight, "Requests in flight at a rank (128)")
      ->transform(whole_number(2, kInt));
  plan->add_flag("--json", args.json, "Print JSON");
  plan->footer(kPlanNotes);
}

void add_bench(CLI::App& app, BenchArgs& args) {
  CLI::App* bench = app.add_subcommand("bench", "Measure steps beside a plain memory copy");
  bench->add_flag("--list", args.list, "List the scenarios");
  bench
      ->add_option("--scenario", args.scenarios,
                   "Names (those that --list marks with *); a * at the end fits any ending")
      ->delimiter(',');
  bench->add_option("--strategy", args.strategies, "Names of strategies, or anchor-mpi-pack (all)")
      ->delimiter(',');
  bench->add_option("--communicator", args.communicators, "Engines (those that work here)")
      ->delimiter(',')
      ->check(one_of({"threads", "mpi"}));
  bench->add_option("--device", args.device, "cuda: the scenarios h200-* by default")
      ->check(one_of({"cpu", "cuda"}))
      ->capture_default_str();
  bench->add_option("--ranks", args.ranks, "Ranks (the scenario's)")
      ->transform(whole_number(1, kMaxRanks));
  bench->add_option("--ranks-per-node", args.ranks_per_node, "Treat every so many ranks as a node")
      ->transform(whole_number(0, kMaxRanks));
  bench
      ->add_option("--max-in-flight", args.max_in_flight,
                   "Requests in flight at a rank, with mpi (128)")
      ->transform(whole_number(2, kInt));
  bench
      ->add_option("--max-sms", args.max_sms,
                   "Multiprocessors of a rank at most, with cuda; 0: all (the scenario's)")
      ->transform(whole_number(0, kInt));
  bench->add_option("--repeat", args.repeat, "Timed repetitions")
      ->transform(whole_number(1, kInt))
      ->capture_default_str();
  bench->add_option("--warm-up", args.warm_up, "Repetitions before them")
      ->transform(whole_number(0, kInt))
      ->capture_default_str();
  bench->add_flag_callback(
      "--no-check", [&args] { args.check = false; },
      "Do not compare results with the expected bits");
  bench->add_flag("--json", args.json, "Print JSON");
  bench->footer(kBenchNotes);
}

void add_info(CLI::App& app, InfoArgs& args) {
  CLI::App* info = app.add_subcommand("info", "What is built in and what works on this machine");
  info->add_flag("--json", args.json, "Print JSON");
  info->footer("Example:\n  crossdock info --json");
}

// The first word that no option took.
std::string first_leftover(const CLI::App& app, int argc, const char* const* argv) {
  const std::vector<std::string> leftovers = app.remaining(/*recurse=*/true);
  for (int i = 1; i < argc; ++i) {
    if (std::find(leftovers.begin(), leftovers.end(), argv[i]) != leftovers.end()) return argv[i];
  }
  return leftovers.empty() ? "" : leftovers.front();
}

// Null if none was named.
const CLI::App* command_of(const CLI::App& app) {
  const std::vector<CLI::App*> named = app.get_subcommands();
  return named.empty() ? nullptr : named.front();
}

// In our words where those of CLI11 are not plain.
std::string describe(const CLI::ParseError& error, const CLI::App* command,
                     const std::string& leftover) {
  std::string message = error.what();
  if (!leftover.empty()) {
    return (command != nullptr ? "unknown option or argument \"" : "unknown command or option \"") +
           leftover + "\"";
  }
  if (command == nullptr) return "a command is required";
  const size_t colon = message.find(": ");
  if (colon == std::string::npos) return message;
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    const std::string name = message.substr(0, colon);
    const CLI::Option* option = command->get_option_no_throw(name);
    const bool is_repeated = option != nullptr && option->count() > 1;
    return name + (is_repeated ? " must be given once, not " + std::to_string(option->count()) +
                                     " times; leave one value"
                               : " needs a value");
  }
  if (message.compare(colon, 6, ": must") == 0) message.erase(colon, 1);
  return message;
}

}  // namespace

bool CommandLine::wants_json() const {
  return run.json || verify.json || plan.json || bench.json || info.json;
}

CommandLine read_command_line(int argc, const char* const* argv) {
  CLI::App app(
      "Expert parallelism for Mixture-of-Experts models: tokens to their experts and back.",
      "crossdock");
  app.set_version_flag("--version", "crossdock " + std::string(describe_build().version));
  app.require_subcommand(1);
  app.footer(kExamples);
  CommandLine line;
  add_run(app, line.run);
  add_verify(app, line.verify);
  add_eval(app, line.eval);
  add_plan(app, line.plan);
  add_bench(app, line.bench);
  add_info(app, line.info);
  line.words.assign(argv + 1, argv + argc);
  line.run.words = line.words;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      std::ostringstream help;
      app.exit(error, help, help);
      line.help = help.str();
      // CLI11 leaves an empty line for options that it does not show.
      if (const size_t gap = line.help.find("\n\n\n"); gap != std::string::npos) {
        line.help.erase(gap, 1);
      }
    } else {
      const CLI::App* command = command_of(app);
      line.complaint = describe(error, command, first_leftover(app, argc, argv));
    }
  }
  if (const CLI::App* command = command_of(app)) line.command = command->get_name();
  return line;
}

}  // namespace crossdock::cli
