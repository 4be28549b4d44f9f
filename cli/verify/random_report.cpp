#include "cli/verify/random_report.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/json_writer.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/verify/random_cases.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

std::string failure_text(const RandomReport& report, const RandomFailure& failure, int width) {
  const std::string number = std::to_string(failure.number);
  std::string text =
      wrap("case " + number + " of seed " + std::to_string(report.seed) + " (" +
               report.communicator + ") failed: " +
               make_random_case(report.seed, failure.number, report.ranks, report.device == "cuda")
                   .summary,
           width, 2) +
      "\n";
  for (const std::string& finding : failure.findings) text += wrap("  " + finding, width, 4) + "\n";
  if (!failure.file.empty()) {
    text += "  to reproduce: crossdock eval --check " + failure.file + "\n";
  }
  return text;
}

std::string last_line(const RandomReport& report, const TextStyle& style) {
  const RandomResult& result = report.result;
  const double rate = result.seconds > 0 ? double(result.num_cases) / result.seconds : 0.0;
  return counted(result.num_cases, "random case") + " on " + report.communicator +
         (report.device == "cuda" ? " and GPUs" : "") + " in " + fixed(result.seconds, 1) + " s (" +
         fixed(rate, 0) + " per second), seed " + std::to_string(report.seed) + ", at most " +
         counted(report.ranks, "rank") + ", checksum " + hex(result.checksum) + ": " +
         paint(report.passed() ? "all passed" : "FAILED",
               report.passed() ? Colour::kGreen : Colour::kRed, style) +
         "\n";
}

}  // namespace

std::string hex(uint64_t bits) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(bits));
  return digits.data();
}

std::string to_text(const std::vector<RandomReport>& reports, const TextStyle& style) {
  std::string text;
  for (const RandomReport& report : reports) {
    for (const RandomFailure& failure : report.result.failures) {
      text += failure_text(report, failure, style.width) + "\n";
    }
  }
  for (const RandomReport& report : reports) text += last_line(report, style);
  return text;
}

std::string to_json(const std::vector<RandomReport>& reports) {
  JsonWriter writer(3);
  writer.begin_object();
  writer.field("passed", std::ranges::all_of(reports, &RandomReport::passed));
  writer.key("results");
  writer.begin_array();
  for (const RandomReport& report : reports) {
    writer.begin_object();
    writer.field("communicator", report.communicator);
    writer.field("device", report.device);
    writer.field("ranks", report.ranks);
    writer.field("seed", std::to_string(report.seed));  // may exceed what doubles represent
    writer.field("cases", report.result.num_cases);
    writer.field("seconds", report.result.seconds);
    writer.field("checksum", hex(report.result.checksum));
    writer.key("failures");
    writer.begin_array();
    for (const RandomFailure& failure : report.result.failures) {
      writer.begin_object();
      writer.field("case", failure.number);
      writer.field("strategy", failure.strategy);
      writer.key("findings");
      writer.list(failure.findings);
      writer.field("file", failure.file);
      writer.end_object();
    }
    writer.end_array();
    writer.end_object();
  }
  writer.end_array();
  writer.end_object();
  return writer.text();
}

std::vector<RandomReport> parse_random_reports(const std::string& json) {
  std::vector<RandomReport> reports;
  try {
    const nlohmann::json whole = nlohmann::json::parse(json);
    for (const auto& entry : whole.at("results")) {
      RandomReport& report = reports.emplace_back();
      report.communicator = entry.at("communicator");
      report.device = entry.at("device");
      report.ranks = entry.at("ranks");
      report.seed = std::stoull(entry.at("seed").get<std::string>());
      report.result.num_cases = entry.at("cases");
      report.result.seconds = entry.at("seconds");
      report.result.checksum = std::stoull(entry.at("checksum").get<std::string>(), nullptr, 16);
      for (const auto& failure : entry.at("failures")) {
        report.result.failures.push_back({failure.at("case"), failure.at("strategy"),
                                          failure.at("findings"), failure.at("file")});
      }
    }
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kInternal, std::string("results of the ranks: ") + error.what());
  }
  return reports;
}

}  // namespace crossdock::cli
