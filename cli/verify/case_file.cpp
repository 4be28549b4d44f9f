#include "cli/verify/case_file.hpp"

#include "cli/device/rank_device.hpp"
#include "cli/device/tensor_place.hpp"
#include "cli/eval/dispatch_case.hpp"
#include "cli/eval/layer_case.hpp"
#include "cli/json.hpp"
#include "cli/processes/launch.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/verify/random_cases.hpp"
#include "cli/verify/random_run.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/testing/layer_worlds.hpp"

namespace crossdock::cli {

static void describe(auto& fields, CaseReport& report) {
  fields.derived("passed", report.passed());
  fields.text("checksum", report.bits, 16);
  fields("findings", report.findings);
}

namespace {

constexpr std::chrono::seconds kCaseDeadline{20};

CaseReport report_of(testing::CaseVerdict verdict) {
  return {.findings = std::move(verdict.findings), .bits = verdict.bits};
}

CaseReport parse_case_report(const std::string& output) {
  CaseReport report;
  read_output(output, [&](const Json& json) { read_json(json, report); });
  return report;
}

}  // namespace

StrategyList candidates_on(const std::string& device) {
  if (device != "cuda") return built_in_strategies();
  StrategyList candidates;
  for (const std::string& name : built_in_strategies().names()) {
    candidates.add(
        [name] { return conformance::on_device(make_strategy(name), tensor_places("cuda")); });
  }
  return candidates;
}

GroupOptions group_options_of_cases() {
  return {.arrival_deadline = kCaseDeadline, .progress_deadline = kCaseDeadline};
}

CaseFile parse_case_file(const std::string& text) {
  const std::string kind = kind_of_case(text);
  CaseFile file;
  if (kind == "layer") {
    const LayerCase parsed = parse_layer_case(text);
    file = {.strategy = parsed.strategy,
            .communicator = parsed.communicator,
            .device = parsed.device,
            .one = testing::layer_case(parsed.layer, parsed.ranks_per_node,
                                       tensor_places(parsed.device))};
  } else if (kind == "dispatch") {
    const DispatchCase parsed = parse_dispatch_case(text);
    file = {.strategy = parsed.strategy,
            .communicator = parsed.communicator,
            .device = parsed.device,
            .one = random_case_of(parsed.world, parsed.ranks_per_node)};
  } else {
    throw Error(ErrorCode::kInvalidArgument,
                "kind must be \"dispatch\" or \"layer\"; got \"" + kind + "\"");
  }
  if (file.strategy != "auto") make_strategy(file.strategy);  // throws if it is unknown
  return file;
}

CaseReport run_case_file(const CaseFile& file, const std::string& path) {
  if (file.communicator == "threads") {
    const bool on_gpu = file.device == "cuda";
    if (on_gpu) prepare_gpus();
    const RandomRun run{.candidates = candidates_on(file.device),
                        .on_gpu = on_gpu,
                        .group = group_options_of_cases()};
    return report_of(judge_on_threads(run, file.one, file.strategy));
  }
  return parse_case_report(run_processes({.communicator = file.communicator,
                                          .ranks = file.one.num_ranks,
                                          .args = {"verify", "--case-file", path, "--always-zero",
                                                   "--communicator", file.communicator},
                                          .limit = 6 * kCaseDeadline}));
}

CaseReport run_case_file_as_rank(const CaseFile& file, const std::string& job) {
  const bool on_gpu = file.device == "cuda";
  if (on_gpu) prepare_gpus();
  Group group(make_job_communicator(job, {.ranks_per_node = file.one.ranks_per_node}),
              group_options_of_cases());
  if (group.size() != file.one.num_ranks) {
    throw Error(ErrorCode::kInvalidArgument,
                "the case needs " + std::to_string(file.one.num_ranks) + " ranks; the job has " +
                    std::to_string(group.size()));
  }
  return report_of(
      testing::judge_case(group, file.one, {file.strategy}, candidates_on(file.device), on_gpu));
}

std::string to_json(const CaseReport& report) {
  return json_text(json_of(report));
}

}  // namespace crossdock::cli
