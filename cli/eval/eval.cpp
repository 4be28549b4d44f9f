#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "cli/commands.hpp"
#include "cli/eval/case.hpp"
#include "cli/eval/check.hpp"
#include "cli/eval/dispatch_case.hpp"
#include "cli/eval/processes.hpp"
#include "cli/eval/run.hpp"
#include "cli/json.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/processes/memory_file.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/terminal.hpp"
#include "cli/verify/case_file.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

std::string read_all(const std::string& path) {
  const bool is_standard = path == "-";
  std::FILE* file = is_standard ? stdin : std::fopen(path.c_str(), "rb");
  std::string text;
  if (file) {
    std::array<char, 65536> block;
    while (const size_t count = std::fread(block.data(), 1, block.size(), file)) {
      text.append(block.data(), count);
    }
  }
  if (!file || std::ferror(file)) {
    const std::string reason = std::strerror(errno);
    if (file && !is_standard) std::fclose(file);
    throw Error(
        ErrorCode::kInvalidArgument,
        "cannot read " + (is_standard ? "standard input" : "\"" + path + "\"") + ": " + reason);
  }
  if (!is_standard) std::fclose(file);
  return text;
}

// values [height, width]
Json matrix_of(const std::vector<double>& values, int64_t width) {
  Json rows = Json::array();
  for (auto row = values.begin(); row != values.end(); row += width) {
    rows.push_back(std::vector<double>(row, row + width));
  }
  return rows;
}

Json bias_of(const std::vector<double>& values) {
  return values.empty() ? Json() : Json(values);
}

std::string to_json(const EvalCase& eval_case, const EvalResult& result) {
  const DispatchConfig& config = eval_case.layer.config;
  Json per_rank = Json::array();
  for (const EvalRank& rank : result.ranks) {
    per_rank.push_back({{"rows", matrix_of(rank.rows, config.width)},
                        {"rows_per_expert", rank.rows_per_expert},
                        {"out", matrix_of(rank.out, config.width)},
                        {"grad_x", matrix_of(rank.grad_x, config.width)},
                        {"grad_weights", matrix_of(rank.grad_weights, config.top_k)}});
  }
  Json per_expert = Json::array();
  for (const reference::MlpWeights& grads : result.expert_grads) {
    per_expert.push_back({{"grad_w1", matrix_of(grads.w1, config.width)},
                          {"grad_w2", matrix_of(grads.w2, eval_case.layer.mlp.F)},
                          {"grad_b1", bias_of(grads.b1)},
                          {"grad_b2", bias_of(grads.b2)}});
  }
  return json_text(
      {{"per_rank", per_rank}, {"per_expert", per_expert}, {"dropped", result.dropped()}}, 3);
}

int print(const std::string& json, int status) {
  std::cout << json << "\n" << std::flush;
  return status;
}

// A case whose calls are all judged.
int run_kind(const EvalArgs& args, const std::string& text) {
  CaseFile file = parse_case_file(text);
  if (!args.communicator.empty()) file.communicator = args.communicator;
  std::optional<MemoryFile> copy;
  if (args.path == "-") copy.emplace(text);
  const CaseReport report = run_case_file(file, copy ? copy->path() : args.path);
  const int status = print(to_json(report), report.passed() ? 0 : 1);
  if (args.check) {
    const std::string words = report.passed()
                                  ? "checked against the fp64 reference: " + file.one.summary
                                  : "differs from the fp64 reference: " + report.findings.front();
    std::cerr << wrap(words, message_width(), 2) << "\n";
  }
  return status;
}

}  // namespace

int run_eval(const EvalArgs& args) {
  if (args.as_rank) {
    run_case_as_rank(parse_case(read_all(args.path)), launched_communicator({args.communicator}));
    return 0;
  }
  try {
    const std::string text = read_all(args.path);
    if (!kind_of_case(text).empty()) return run_kind(args, text);
    EvalCase eval_case = parse_case(text);
    if (!args.communicator.empty()) eval_case.communicator = args.communicator;
    const EvalResult result = eval_case.communicator == "threads"
                                  ? run_case(eval_case)
                                  : run_case_on_processes(eval_case, args.path, text);
    const std::string json = to_json(eval_case, result);
    if (!args.check) return print(json, 0);
    const CheckReport report = check_result(eval_case, result);
    const int status = print(json, report.passed ? 0 : 1);
    std::cerr << wrap(report.summary, message_width(), 2) << "\n";
    return status;
  } catch (const std::bad_alloc&) {
    return print(error_json("not enough memory for this case"), 1);
  } catch (const std::exception& e) {
    return print(error_json(e.what()), 1);
  }
}

}  // namespace crossdock::cli
