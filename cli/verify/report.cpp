#include "cli/verify/report.hpp"

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/json_writer.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

constexpr size_t kShownFailures = 20;
constexpr int kNameWidth = 14;
constexpr int kCellWidth = 13;

std::string column_of(const VerifyCell& cell) {
  return cell.communicator + " P" + std::to_string(cell.ranks);
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

void write_failures(const std::vector<VerifyResult>& results, std::ostream& out) {
  size_t shown = 0;
  size_t all = 0;
  for (const VerifyResult& result : results) {
    for (const conformance::Failure& failure : result.failures) {
      if (++all > kShownFailures) continue;
      out << "\n"
          << result.cell.strategy << ", " << column_of(result.cell) << ", " << failure.check
          << "\n  " << failure.message << "\n";
      ++shown;
    }
  }
  if (all > shown) out << "\nand " << all - shown << " more\n";
}

}  // namespace

std::string to_text(const std::vector<VerifyResult>& results, bool colour) {
  std::ostringstream out;
  const std::vector<std::string> columns = distinct(results, column_of);
  out << std::left << std::setw(kNameWidth) << "strategy";
  for (const std::string& column : columns) out << std::setw(kCellWidth) << column;
  out << "\n";
  for (const std::string& strategy : distinct(results, strategy_of)) {
    out << std::setw(kNameWidth) << strategy;
    for (const std::string& column : columns) {
      const auto found = std::find_if(results.begin(), results.end(), [&](const auto& result) {
        return result.cell.strategy == strategy && column_of(result.cell) == column;
      });
      const std::string words = found == results.end() ? "-" : verdict_of(*found);
      const bool failed = found != results.end() && !found->passed();
      if (colour) out << (failed ? "\x1b[31m" : "\x1b[32m");
      out << std::setw(kCellWidth) << words << (colour ? "\x1b[0m" : "");
    }
    out << "\n";
  }
  write_failures(results, out);
  int64_t num_checks = 0;
  double seconds = 0;
  bool passed = true;
  for (const VerifyResult& result : results) {
    num_checks += result.num_checks;
    seconds += result.seconds;
    passed = passed && result.passed();
  }
  out << "\n"
      << num_checks << " checks in " << std::fixed << std::setprecision(1) << seconds
      << " s: " << (passed ? "all passed" : "FAILED") << "\n";
  return out.str();
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
                     .ranks_per_node = entry.at("ranks_per_node")};
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
