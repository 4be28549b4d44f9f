#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <new>
#include <stdexcept>
#include <string>

#include "cli/commands.hpp"
#include "cli/eval/case.hpp"
#include "cli/eval/check.hpp"
#include "cli/eval/dispatch_case.hpp"
#include "cli/eval/processes.hpp"
#include "cli/eval/run.hpp"
#include "cli/json_writer.hpp"
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

// values [height, width], in `width` columns
void write_matrix(JsonWriter& writer, const char* name, const std::vector<double>& values,
                  int64_t width) {
  writer.key(name);
  writer.begin_array();
  for (size_t i = 0; i < values.size(); ++i) {
    if (i % static_cast<size_t>(width) == 0) {
      if (i > 0) writer.end_array();
      writer.begin_array();
    }
    writer.value(values[i]);
  }
  if (!values.empty()) writer.end_array();
  writer.end_array();
}

void write_vector(JsonWriter& writer, const char* name, const auto& values) {
  writer.key(name);
  writer.list(values);
}

void write_bias(JsonWriter& writer, const char* name, const std::vector<double>& values) {
  if (!values.empty()) return write_vector(writer, name, values);
  writer.key(name);
  writer.null();
}

std::string to_json(const EvalCase& eval_case, const EvalResult& result) {
  const DispatchConfig& config = eval_case.layer.config;
  JsonWriter writer(3);
  writer.begin_object();
  writer.key("per_rank");
  writer.begin_array();
  for (const EvalRank& rank : result.ranks) {
    writer.begin_object();
    write_matrix(writer, "rows", rank.rows, config.width);
    write_vector(writer, "rows_per_expert", rank.rows_per_expert);
    write_matrix(writer, "out", rank.out, config.width);
    write_matrix(writer, "grad_x", rank.grad_x, config.width);
    write_matrix(writer, "grad_weights", rank.grad_weights, config.top_k);
    writer.end_object();
  }
  writer.end_array();
  writer.key("per_expert");
  writer.begin_array();
  for (const reference::MlpWeights& grads : result.expert_grads) {
    writer.begin_object();
    write_matrix(writer, "grad_w1", grads.w1, config.width);
    write_matrix(writer, "grad_w2", grads.w2, eval_case.layer.mlp.F);
    write_bias(writer, "grad_b1", grads.b1);
    write_bias(writer, "grad_b2", grads.b2);
    writer.end_object();
  }
  writer.end_array();
  write_vector(writer, "dropped", result.dropped());
  writer.end_object();
  return writer.text();
}

int print(const std::string& json, int status) {
  std::cout << json << "\n" << std::flush;
  return status;
}

// A case whose calls are all judged.
int run_kind(const EvalArgs& args, const std::string& text) {
  CaseFile file = parse_case_file(text);
  if (!args.communicator.empty()) file.communicator = args.communicator;
  const CaseReport report = run_case_file(file, args.path);
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
  try {
    const std::string text = read_all(args.path);
    if (!kind_of_case(text).empty()) return run_kind(args, text);
    EvalCase eval_case = parse_case(text);
    if (!args.communicator.empty()) eval_case.communicator = args.communicator;
    if (eval_case.communicator == "mpi") {
      throw Error(ErrorCode::kUnsupported,
                  "only cases with a kind can run on mpi; use --communicator sockets");
    }
    const EvalResult result = eval_case.communicator == "sockets" ? run_case_on_processes(eval_case)
                                                                  : run_case(eval_case);
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
