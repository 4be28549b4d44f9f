#include "cli/verify/report.hpp"

#include <algorithm>

#include "cli/json.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"
#include "crossdock/error.hpp"

namespace crossdock::conformance {

static void describe(auto& fields, Failure& failure) {
  fields("check", failure.check);
  fields("message", failure.message);
}

}  // namespace crossdock::conformance

namespace crossdock::cli {

static void describe(auto& fields, VerifyResult& result) {
  fields("strategy", result.cell.strategy);
  fields("communicator", result.cell.communicator);
  fields("ranks", result.cell.ranks);
  fields("ranks_per_node", result.cell.ranks_per_node);
  fields("device", result.cell.device);
  fields("selected", result.num_selected);
  fields("checks", result.num_checks);
  fields("seconds", result.seconds);
  fields("failures", result.failures);
}

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

std::string to_text(const std::vector<VerifyResult>& results, double seconds,
                    const TextStyle& style) {
  int64_t num_checks = 0;
  bool passed = true;
  for (const VerifyResult& result : results) {
    num_checks += result.num_checks;
    passed = passed && result.passed();
  }
  return matrix_text(results, style) + failures_text(results, style.width) + "\n" +
         counted(num_checks, "check") + " in " + fixed(seconds, 1) + " s: " +
         paint(passed ? "all passed" : "FAILED", passed ? Colour::kGreen : Colour::kRed, style) +
         "\n";
}

std::string to_json(const std::vector<VerifyResult>& results) {
  return json_text({{"passed", std::ranges::all_of(results, &VerifyResult::passed)},
                    {"results", json_of(results)}});
}

std::vector<VerifyResult> parse_verify_results(const std::string& text) {
  std::vector<VerifyResult> results;
  read_output(text, [&](const Json& whole) { read_json(whole.at("results"), results); });
  return results;
}

}  // namespace crossdock::cli
