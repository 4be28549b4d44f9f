#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>

#include "commands.hpp"
#include "crossdock/activation.hpp"
#include "crossdock/build.hpp"
#include "crossdock/fabric.hpp"
#include "crossdock/model_presets.hpp"
#include "crossdock/strategy.hpp"

namespace {

constexpr int kBadArguments = 2;

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

std::vector<std::string> names_of_presets() {
  std::vector<std::string> names;
  names.reserve(std::size(crossdock::kModelPresets));
  for (const crossdock::ModelPreset& preset : crossdock::kModelPresets) {
    names.emplace_back(preset.name);
  }
  return names;
}

CLI::App* add_info(CLI::App& app, crossdock::cli::InfoArgs& args) {
  CLI::App* info = app.add_subcommand("info", "What is built in and what works on this machine");
  info->add_flag("--json", args.json, "Print JSON");
  info->footer("Example:\n  crossdock info --json");
  return info;
}

CLI::App* add_eval(CLI::App& app, crossdock::cli::EvalArgs& args) {
  CLI::App* eval = app.add_subcommand("eval", "Run a small explicit case and print all results");
  eval->add_option("CASE", args.path, "File with the case as JSON; - for standard input")
      ->required();
  eval->add_flag("--check", args.check,
                 "Compare with the fp64 reference and say so on standard error; a difference is "
                 "exit status 1");
  eval->footer(kEvalNotes);
  return eval;
}

CLI::App* add_bench(CLI::App& app, crossdock::cli::BenchArgs& args) {
  CLI::App* bench = app.add_subcommand("bench", "Measure steps beside a plain memory copy");
  bench->add_flag("--list", args.list, "List the scenarios");
  bench->add_flag("--json", args.json, "Print JSON");
  bench->add_flag_callback(
      "--no-check", [&] { args.check = false; }, "Do not compare results with the expected bits");
  bench->add_option("--scenario", args.scenarios, "Names; a * at the end fits any ending")
      ->delimiter(',');
  bench->add_option("--strategy", args.strategies, "Names of strategies, or anchor-mpi-pack")
      ->delimiter(',');
  bench->add_option("--communicator", args.communicators, "threads, mpi; those that work here")
      ->delimiter(',');
  bench->add_option("--device", args.device, "cuda: the scenarios h200-* by default")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  bench->add_option("--ranks", args.ranks, "Instead of the scenario's number")
      ->check(CLI::Range(1, 1024));
  bench->add_option("--ranks-per-node", args.ranks_per_node, "Treat so many ranks as a node")
      ->check(CLI::Range(0, 1 << 20));
  bench->add_option("--max-in-flight", args.max_in_flight, "Requests at a time, with mpi (128)")
      ->check(CLI::Range(2, 1 << 20));
  bench->add_option("--repeat", args.repeat, "Timed repetitions")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  bench->add_option("--warm-up", args.warm_up, "Repetitions before them")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 20));
  bench->footer(kBenchNotes);
  return bench;
}

std::vector<std::string> names_of_fabrics() {
  std::vector<std::string> names;
  names.reserve(std::size(crossdock::kFabricPresets));
  for (const crossdock::Fabric& preset : crossdock::kFabricPresets) names.emplace_back(preset.name);
  return names;
}

std::vector<std::string> strategies_and_auto() {
  std::vector<std::string> names = crossdock::strategy_names();
  names.emplace_back("auto");
  return names;
}

CLI::App* add_run(CLI::App& app, crossdock::cli::RunArgs& args) {
  CLI::App* run = app.add_subcommand("run", "Run a MoE layer on some ranks, timed and checked");
  run->add_option("--preset", args.preset, "A published model, its widths made smaller")
      ->check(CLI::IsMember(names_of_presets()));
  run->add_option("--scale", args.scale, "Divide the preset's widths by this; 1: full size");
  run->add_option("--tokens", args.tokens, "Tokens per rank (512)");
  run->add_option("--tokens-total", args.tokens_total, "Tokens in all, spread over the ranks");
  run->add_option("--width", args.width, "Token width (512)");
  run->add_option("--inner", args.inner, "Inner width of an expert (256)");
  run->add_option("--shared-inner", args.shared_inner,
                  "Inner width of the shared experts (0: none)");
  run->add_option("--experts", args.experts, "Experts in all (32)");
  run->add_option("--top-k", args.top_k, "Experts per token (4)");
  run->add_option("--strategy", args.strategy, "How rows travel")
      ->check(CLI::IsMember(strategies_and_auto()))
      ->capture_default_str();
  run->add_option("--communicator", args.communicator,
                  "The engine: threads, or mpi, which is chosen under mpirun and else starts it")
      ->check(CLI::IsMember({"threads", "mpi"}));
  run->add_option("--ranks", args.ranks, "Ranks (4; under mpirun its processes)");
  run->add_option("--ranks-per-node", args.ranks_per_node, "Treat every so many ranks as a node");
  run->add_option("--overlap", args.overlap,
                  "Dispatch in so many chunks of local experts, which compute meanwhile")
      ->capture_default_str();
  run->add_option("--trace", args.trace, "Write a trace of all steps, for Perfetto");
  run->add_option("--max-in-flight", args.max_in_flight, "Requests in flight at a rank, with mpi");
  run->add_option("--chunk-bytes", args.chunk_bytes, "Largest message, with mpi");
  run->add_option("--dtype", args.dtype, "Of tokens and parameters")
      ->check(CLI::IsMember({"fp64", "fp32", "bf16", "fp16"}))
      ->capture_default_str();
  run->add_option("--activation", args.activation, "Of the experts (swiglu, or the preset's)")
      ->check(CLI::IsMember(crossdock::kActivationNames));
  run->add_option("--weights-in", args.weights_in, "Where the routes' weights are applied")
      ->check(CLI::IsMember({"combine", "experts"}))
      ->capture_default_str();
  run->add_option("--steps", args.steps, "How often")->capture_default_str();
  run->add_option("--seed", args.seed, "Of tokens and parameters")->capture_default_str();
  run->add_flag("--forward-only", args.forward_only, "No backward");
  run->add_flag("--check,!--no-check", args.check,
                "Compare a sample with the fp64 reference (on); a difference is exit status 1");
  run->add_flag("--json", args.json, "Print JSON");
  run->footer(kRunNotes);
  return run;
}

CLI::App* add_plan(CLI::App& app, crossdock::cli::PlanArgs& args) {
  CLI::App* plan = app.add_subcommand("plan", "What a job needs, before it starts");
  plan->add_option("--model", args.model, "A published model")
      ->check(CLI::IsMember(names_of_presets()));
  plan->add_option("--width", args.width, "Token width");
  plan->add_option("--inner", args.inner, "Inner width of an expert");
  plan->add_option("--experts", args.experts, "Experts in all");
  plan->add_option("--top-k", args.top_k, "Experts per token");
  plan->add_option("--seq", args.sequence, "Sequence length");
  plan->add_option("--micro-batch", args.micro_batch, "Sequences of a micro-batch (1)");
  plan->add_option("--tokens", args.tokens, "Tokens per rank, in place of --seq and --micro-batch");
  plan->add_option("--dtype", args.dtype, "Of tokens; fp8 travels with its scales")
      ->check(CLI::IsMember({"fp64", "fp32", "bf16", "fp16", "fp8_e4m3"}))
      ->capture_default_str();
  plan->add_option("--nodes", args.nodes, "Nodes")->capture_default_str();
  plan->add_option("--ranks-per-node", args.ranks_per_node, "Ranks of a node")
      ->capture_default_str();
  plan->add_option("--tp", args.tp, "Tensor parallel: ranks that share a sequence")
      ->capture_default_str();
  plan->add_option("--cp", args.cp, "Context parallel, likewise")->capture_default_str();
  plan->add_option("--pp", args.pp, "Pipeline stages")->capture_default_str();
  plan->add_option("--ep", args.ep, "Ranks that share the experts (all of a stage)");
  plan->add_option("--alignment", args.alignment, "Rows of an expert begin at multiples of this")
      ->capture_default_str();
  plan->add_option("--capacity", args.capacity, "Capacity factor");
  plan->add_flag("--partial-sums", args.partial_sums, "Combine sums before rows travel home");
  plan->add_option("--zipf", args.zipf, "Skew: expert e is drawn with weight (e + 1)^-zipf")
      ->capture_default_str();
  plan->add_option("--fabric", args.fabric, "Links and memory")
      ->check(CLI::IsMember(names_of_fabrics()))
      ->capture_default_str();
  plan->add_option("--within-rate", args.within_rate, "GB/s of a rank inside its node, one way");
  plan->add_option("--between-rate", args.between_rate, "GB/s of a rank to other nodes, one way");
  plan->add_option("--queue-depth", args.queue_depth, "Entries of a send queue at most (65535)");
  plan->add_option("--max-in-flight", args.max_in_flight, "Requests in flight at a rank (128)");
  plan->add_flag("--json", args.json, "Print JSON");
  plan->footer(kPlanNotes);
  return plan;
}

constexpr const char* kVerifyNotes =
    R"(Every check runs on every strategy, engine and number of ranks that is chosen; the fp64 reference
judges. Without mpirun, MPI ranks are started by it; under mpirun its processes are the ranks.

Examples:
  crossdock verify --quick
  crossdock verify --strategy direct --communicator threads --ranks 4 --case error
  crossdock verify --dtype bf16 --case 'routing/skewed/*'
  crossdock verify --faults --strategy direct --case stalls
  mpirun -np 4 crossdock verify --quick)";

CLI::App* add_verify(CLI::App& app, crossdock::cli::VerifyArgs& args) {
  CLI::App* verify = app.add_subcommand("verify", "Judge strategies and engines by the reference");
  verify->add_flag("--quick", args.quick, "The short run");
  verify->add_option("--strategy", args.strategies, "Names; all")
      ->delimiter(',')
      ->check(CLI::IsMember(crossdock::strategy_names()));
  verify->add_option("--communicator", args.communicators, "threads, mpi; those that work here")
      ->delimiter(',')
      ->check(CLI::IsMember({"threads", "mpi"}));
  verify->add_option("--ranks", args.ranks, "Numbers of ranks (1,2,4,7)")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  verify->add_option("--case", args.cases, "Parts of names of checks, or patterns with *")
      ->delimiter(',');
  verify->add_option("--dtype", args.dtypes, "Checks of these dtypes alone")
      ->delimiter(',')
      ->check(CLI::IsMember({"fp64", "fp32", "bf16", "fp16", "fp8_e4m3"}));
  verify->add_option("--ranks-per-node", args.ranks_per_node, "Treat every so many ranks as a node")
      ->check(CLI::Range(0, 1 << 20));
  verify->add_flag("--faults", args.faults,
                   "Put faults into one rank of four at every step instead");
  verify->add_flag("--list", args.list, "Name the checks, or faults, and run none");
  verify->add_flag("--json", args.json, "Print JSON");
  verify->add_flag("--always-zero", args.always_zero)->group("");  // for ranks it starts itself
  verify->footer(kVerifyNotes);
  return verify;
}

// Prints help and version to standard output, complaints to standard error.
int report(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return app.exit(error);
  const auto* command = app.get_subcommands().empty() ? &app : app.get_subcommands().front();
  const std::string name = command == &app ? "crossdock" : "crossdock " + command->get_name();
  std::string message = error.what();
  if (command == &app && !app.remaining().empty()) {
    message = "unknown command or option \"" + app.remaining().front() + "\"";
  } else if (command == &app) {
    message = "a command is required";
  }
  std::cerr << name << ": " << message << "\nRun `" << name << " --help` for usage.\n";
  return kBadArguments;
}

int run_command_line(int argc, char** argv) {
  using namespace crossdock;
  CLI::App app(
      "Expert parallelism for Mixture-of-Experts models: tokens to their experts and back.",
      "crossdock");
  app.set_version_flag("--version", "crossdock " + std::string(describe_build().version));
  app.require_subcommand(1);
  app.footer(kExamples);
  cli::InfoArgs info_args;
  cli::EvalArgs eval_args;
  cli::BenchArgs bench_args;
  cli::RunArgs run_args;
  cli::PlanArgs plan_args;
  cli::VerifyArgs verify_args;
  const CLI::App* info = add_info(app, info_args);
  add_eval(app, eval_args);
  const CLI::App* bench = add_bench(app, bench_args);
  const CLI::App* run = add_run(app, run_args);
  const CLI::App* plan = add_plan(app, plan_args);
  const CLI::App* verify = add_verify(app, verify_args);

  try {
    app.parse(argc, argv);
    if (*run) {
      run_args.words.assign(argv + 1, argv + argc);
      return cli::run_run(run_args);
    }
    if (*plan) return cli::run_plan(plan_args);
    if (*verify) {
      return verify_args.faults ? cli::run_verify_faults(verify_args)
                                : cli::run_verify(verify_args);
    }
    if (*info) return cli::run_info(info_args);
    if (*bench) return cli::run_bench(bench_args);
    return cli::run_eval(eval_args);
  } catch (const CLI::ParseError& e) {
    return report(app, e);
  } catch (const cli::ArgumentError& e) {
    return report(app, CLI::ValidationError(e.what()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int status = run_command_line(argc, argv);
    if (status == 0 && (!std::cout.flush() || std::fflush(stdout) != 0)) {
      std::fputs("crossdock: cannot write to standard output\n", stderr);
      return 1;
    }
    return status;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "crossdock: %s\n", e.what());
    return 1;
  }
}
