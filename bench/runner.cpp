#include "bench/runner.hpp"

#include <algorithm>
#include <memory>
#include <optional>

#include "bench/agree_bench.hpp"
#include "bench/cuda_bench.hpp"
#include "bench/experts_bench.hpp"
#include "bench/layer_bench.hpp"
#include "bench/memory.hpp"
#include "bench/move_bench.hpp"
#include "bench/workload.hpp"
#include "crossdock/error.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/mpi.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::bench {
namespace {

bool contains(const std::vector<std::string>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

void check_names(const char* what, const std::vector<std::string>& names,
                 const std::vector<std::string>& known) {
  for (const std::string& name : names) {
    if (!contains(known, name)) throw_unknown_name(what, name, known);
  }
}

std::vector<std::string> all_strategies() {
  std::vector<std::string> names = strategy_names();
  names.emplace_back(kAnchorName);
  return names;
}

std::vector<std::string> wanted_communicators(const Selection& selection) {
  check_names("communicator", selection.communicators, {"threads", "mpi", "sockets"});
  if (contains(selection.communicators, "mpi") && !mpi_is_built()) {
    throw Error(ErrorCode::kUnsupported, "communicator mpi: this build has no MPI");
  }
  if (!selection.communicators.empty()) return selection.communicators;
  std::vector<std::string> names = {"threads"};
  if (mpi_is_built()) names.emplace_back("mpi");
  return names;
}

std::vector<std::string> strategies_of(const Scenario& scenario, const Selection& selection) {
  if (scenario.kind == ScenarioKind::kExperts || scenario.kind == ScenarioKind::kCudaProducts ||
      scenario.kind == ScenarioKind::kCudaQuantise || scenario.kind == ScenarioKind::kAgree) {
    return {"none"};
  }
  if (scenario.runs_on_gpu()) return {"direct"};
  if (!scenario.only_strategy.empty()) return {scenario.only_strategy};
  return selection.strategies.empty() ? all_strategies() : selection.strategies;
}

// The communicator is "cuda" for thread ranks on GPUs and "none" for a single rank.
std::vector<std::string> communicators_of(const Scenario& scenario,
                                          const std::vector<std::string>& wanted, bool has_chosen) {
  if (scenario.runs_on_gpu() && (scenario.has_one_rank() || !has_chosen)) return {"cuda"};
  if (scenario.runs_on_gpu()) {
    std::vector<std::string> names = wanted;
    std::ranges::replace(names, std::string("threads"), std::string("cuda"));
    return names;
  }
  if (scenario.kind == ScenarioKind::kExperts) return {"none"};
  return wanted;
}

bool can_run(const Scenario& scenario, const std::string& strategy,
             const std::string& communicator) {
  if (strategy != kAnchorName) return true;
  return scenario.kind == ScenarioKind::kMove && scenario.dtype == DType::kF32 &&
         !scenario.backward && communicator == "mpi";
}

// `sizes`: one scenario at several sizes.
void add_cases(std::vector<Case>& cases, const std::vector<Scenario>& sizes,
               const Selection& selection, const std::vector<std::string>& communicators) {
  const bool has_chosen = !selection.communicators.empty();
  for (const std::string& communicator : communicators_of(sizes[0], communicators, has_chosen)) {
    for (const std::string& strategy : strategies_of(sizes[0], selection)) {
      for (const Scenario& scenario : sizes) {
        if (can_run(scenario, strategy, communicator)) {
          cases.push_back({scenario, strategy, communicator});
        }
      }
    }
  }
  if (cases.size() > kMaxRuns) {
    throw Error(ErrorCode::kInvalidArgument,
                "the combinations of sizes, strategies and communicators must be at most " +
                    std::to_string(kMaxRuns) + "; sweep over fewer values, or name fewer");
  }
}

bool runs_on_gpu(const Case& one) {
  return one.scenario.runs_on_gpu();
}

CudaResult run_on_gpu(const Scenario& scenario, const RunOptions& options) {
  switch (scenario.kind) {
    case ScenarioKind::kCudaLayer:
      return {.steps = run_cuda_layer(scenario, options.repeats, options.check)};
    case ScenarioKind::kCudaOverlap:
      return {.steps = run_cuda_overlap(scenario, options.repeats, options.check)};
    case ScenarioKind::kCudaProducts:
      return {.steps = run_cuda_products(scenario, options.repeats, options.check)};
    case ScenarioKind::kCudaQuantise:
      return {.steps = run_cuda_quantise(scenario, options.repeats, options.check)};
    default:
      return run_cuda_move(scenario, options.repeats, options.check);
  }
}

Result with_gpus(Result result, CudaResult measured) {
  result.gpus = measured.gpus;
  result.link_rate = measured.link_rate;
  result.steps = std::move(measured.steps);
  return result;
}

// Rank 0 checks before any rank allocates; if it refuses, all ranks do.
void agree_on_memory(const Scenario& scenario, Group& group) {
  std::optional<Error> refusal;
  try {
    if (group.rank() == 0) check_memory(scenario);
  } catch (const Error& error) {
    refusal = error;
  }
  group.agree({.operation = "bench", .refusal = refusal ? &*refusal : nullptr});
}

Result describe(const Case& one, const RunOptions& options) {
  const Scenario& s = one.scenario;
  return {.scenario = s.name,
          .strategy = one.strategy,
          .communicator = one.communicator,
          .ranks = s.ranks,
          .tokens = s.tokens,
          .width = s.width,
          .top_k = s.top_k,
          .experts = s.experts,
          .max_sms = s.max_sms,
          .copies = std::string(name_of(s.copies)),
          .dtype = std::string(name_of(s.dtype)),
          .repeat = options.repeats.timed,
          .checked = options.check,
          .steps = {}};
}

// Null for scenarios without a workload.
std::unique_ptr<const Workload> make_workload(const Scenario& scenario) {
  if (scenario.kind != ScenarioKind::kMove) return nullptr;
  return std::make_unique<const Workload>(scenario);
}

std::vector<StepResult> run_rank(const Case& one, const Workload* workload, Group& group,
                                 const RunOptions& options) {
  switch (one.scenario.kind) {
    case ScenarioKind::kExperts:
      return run_experts(one.scenario, group, options.repeats, options.check);
    case ScenarioKind::kAgree:
      return run_agree(group, options.repeats);
    case ScenarioKind::kLayer:
      return run_layer(one.scenario, group, one.strategy, options.repeats, options.check);
    default:
      return run_move(*workload, group, one.strategy, options.repeats, options.check);
  }
}

}  // namespace

std::vector<Case> select_cases(const Selection& selection) {
  check_names("strategy", selection.strategies, all_strategies());
  const std::vector<std::string> communicators = wanted_communicators(selection);
  std::vector<Case> cases;
  for (Scenario scenario : find_scenarios(selection.scenarios)) {
    if (selection.max_sms && scenario.runs_on_gpu()) scenario.max_sms = *selection.max_sms;
    if (scenario.runs_on_gpu()) scenario.copies = selection.copies;
    add_cases(cases, sweep(scenario, selection.sizes), selection, communicators);
  }
  if (cases.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "no scenario matches these strategies and communicators (anchor-mpi-pack needs "
                "communicator mpi and an fp32 scenario without backward)");
  }
  if (selection.max_sms && std::ranges::none_of(cases, runs_on_gpu)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "--max-sms limits the multiprocessors of ranks on a GPU, but no selected scenario runs on "
        "one; leave it out or select GPU scenarios (h200-*, layer-*, grouped-*, custom-cuda)");
  }
  if (selection.copies != Copies::kAuto && std::ranges::none_of(cases, runs_on_gpu)) {
    throw Error(ErrorCode::kInvalidArgument,
                "--copies is for ranks on a GPU, but no selected scenario runs on one; leave it "
                "out or select GPU scenarios (h200-*, custom-cuda)");
  }
  const auto has_one_rank = [](const Case& one) {
    return runs_on_gpu(one) && one.scenario.has_one_rank();
  };
  const auto on_gpu = std::ranges::find_if(cases, has_one_rank);
  if (on_gpu != cases.end() && !contains(communicators, "threads")) {
    throw Error(ErrorCode::kInvalidArgument,
                "scenario " + on_gpu->scenario.name +
                    " has one rank, a thread of the command, but the communicator is " +
                    communicators.front() +
                    "; leave --communicator out, and run the command without a launcher");
  }
  return cases;
}

bool has_processes(const Case& one) {
  return one.communicator == "mpi" || one.communicator == "sockets";
}

Result run_case(const Case& one, const RunOptions& options) {
  Result result = describe(one, options);
  if (runs_on_gpu(one)) return with_gpus(std::move(result), run_on_gpu(one.scenario, options));
  check_memory(one.scenario);
  const std::unique_ptr<const Workload> workload = make_workload(one.scenario);
  run_ranks(one.scenario.ranks,
            [&](Group& group) {
              auto steps = run_rank(one, workload.get(), group, options);
              if (group.rank() == 0) result.steps = std::move(steps);
            },
            {.ranks_per_node = options.ranks_per_node, .group = options.group});
  return result;
}

Result run_case(const Case& one, Group& group, const RunOptions& options) {
  if (one.scenario.ranks != group.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                "scenario " + one.scenario.name + " is for " + std::to_string(one.scenario.ranks) +
                    " ranks, but there are " + std::to_string(group.size()) + " processes");
  }
  Result result = describe(one, options);
  if (runs_on_gpu(one)) {
    return with_gpus(std::move(result),
                     run_cuda_move(one.scenario, group, options.repeats, options.check));
  }
  agree_on_memory(one.scenario, group);
  result.steps = run_rank(one, make_workload(one.scenario).get(), group, options);
  return result;
}

}  // namespace crossdock::bench
