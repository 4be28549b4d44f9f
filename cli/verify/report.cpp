#include "cli/verify/report.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/json_writer.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

constexpr size_t kShownFailures = 20;

std::string ranks_of(const VerifyCell& cell) {
  return cell.communicator + (cell.device == "cuda" ? " on GPUs, " : ", ") +
         counted(cell.ranks, "rank");
}

// In the order they first appear.
std::vector<std::string> distinct(const std::vector<VerifyResult>& results, const auto& name_of) {
  std::vector<std::string> names;
  for (const VerifyResult& result : results) {
    if (std::find(names.begin(), names.end(), name_of(result.cell)) == names.end()) {
      names.push_back(name_of(result.cell));
    }
  }
  return names;
}

std::string verdict_of(const VerifyResult& result) {
  if (result.passed()) return std::to_string(result.num_checks) + " ok";
  if (result.num_checks < result.num_selected) return "broke";
  return std::to_string(result.failures.size()) + " failed";
}

std::string strategy_of(const VerifyCell& cell) {
  return cell.strategy;
}

std::string failures_text(const std::vector<VerifyResult>& results, int width) {
  std::string text;
  size_t count = 0;
  for (const VerifyResult& result : results) {
    for (const conformance::Failure& failure : result.failures) {
      if (++count > kShownFailures) continue;
      const std::string where = strategy_of(result.cell) + ", " + ranks_of(result.cell);
      text += "\n" + wrap(where + ", " + failure.check, width, 2) + "\n" +
              wrap("  " + failure.message, width, 2) + "\n";
    }
  }
  if (count > kShownFailures) {
    text += "\nand " + std::to_string(count - kShownFailures) + " more\n";
  }
  return text;
}

std::string matrix_text(const std::vector<VerifyResult>& results, const TextStyle& style) {
  const std::vector<std::string> strategies = distinct(results, strategy_of);
  std::vector<Column> columns = {{"", Align::kLeft}};
  for (const std::string& strategy : strategies) columns.push_back({strategy});
  Table table(style, columns, /*indent=*/0);
  for (const std::string& ranks : distinct(results, ranks_of)) {
    std::vector<Cell> cells = {ranks};
    for (const std::string& strategy : strategies) {
      const auto found = std::ranges::find_if(results, [&](const VerifyResult& result) {
        return strategy_of(result.cell) == strategy && ranks_of(result.cell) == ranks;
      });
      if (found == results.end()) {
        cells.emplace_back("-");
      } else {
        cells.emplace_back(verdict_of(*found), found->passed() ? Colour::kGreen : Colour::kRed);
      }
    }
    table.add_row(std::move(cells));
  }
  return table.text();
}

}  // namespace

std::string to_text(const std::vector<VerifyResult>& results, const TextStyle& style) {
  int64_t num_checks = 0;
  double seconds = 0;
  bool passed = true;
  for (const VerifyResult& result : results) {
    num_checks += result.num_checks;
    seconds += result.seconds;
    passed = passed && result.passed();
  }
  return matrix_text(results, style) + failures_text(results, style.width) + "\n" +
         counted(num_checks, "check") + " in " + fixed(seconds, 1) + " s: " +
         paint(passed ? "all passed" : "FAILED", passed ? Colour::kGreen : Colour::kRed, style) +
         "\n";
}

std::string to_json(const std::vector<VerifyResult>& results) {
  JsonWriter writer(2);
  writer.begin_object();
  writer.field("passed", std::all_of(results.begin(), results.end(),
                                     [](const auto& result) { return result.passed(); }));
  writer.key("results");
  writer.begin_array();
  for (const VerifyResult& result : results) {
    writer.begin_object();
    writer.field("strategy", std::string_view(result.cell.strategy));
    writer.field("communicator", std::string_view(result.cell.communicator));
    writer.field("ranks", result.cell.ranks);
    writer.field("ranks_per_node", result.cell.ranks_per_node);
    writer.field("device", std::string_view(result.cell.device));
    writer.field("selected", result.num_selected);
    writer.field("checks", result.num_checks);
    writer.field("seconds", result.seconds);
    writer.key("failures");
    writer.begin_array();
    for (const conformance::Failure& failure : result.failures) {
      writer.begin_object();
      writer.field("check", std::string_view(failure.check));
      writer.field("message", std::string_view(failure.message));
      writer.end_object();
    }
    writer.end_array();
    writer.end_object();
  }
  writer.end_array();
  writer.end_object();
  return writer.text();
}

std::vector<VerifyResult> parse_verify_results(const std::string& json) {
  std::vector<VerifyResult> results;
  try {
    const nlohmann::json whole = nlohmann::json::parse(json);
    for (const auto& entry : whole.at("results")) {
      VerifyResult& result = results.emplace_back();
      result.cell = {.strategy = entry.at("strategy"),
                     .communicator = entry.at("communicator"),
                     .ranks = entry.at("ranks"),
                     .ranks_per_node = entry.at("ranks_per_node"),
                     .device = entry.at("device")};
      result.num_selected = entry.at("selected");
      result.num_checks = entry.at("checks");
      result.seconds = entry.at("seconds");
      for (const auto& failure : entry.at("failures")) {
        result.failures.push_back({failure.at("check"), failure.at("message")});
      }
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInternal, std::string("results of the ranks: ") + error.what());
  }
  return results;
}

}  // namespace crossdock::cli
