#include "cli/verify/random_report.hpp"

#include <algorithm>

#include "cli/json.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/verify/random_cases.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {

static void describe(auto& fields, RandomFailure& failure) {
  fields("case", failure.number);
  fields("strategy", failure.strategy);
  fields("findings", failure.findings);
  fields("file", failure.file);
}

static void describe(auto& fields, RandomReport& report) {
  fields("communicator", report.communicator);
  fields("device", report.device);
  fields("ranks", report.ranks);
  fields.text("seed", report.seed, 10);  // may exceed what doubles represent
  fields("cases", report.result.num_cases);
  fields("seconds", report.result.seconds);
  fields.text("checksum", report.result.checksum, 16);
  fields("failures", report.result.failures);
  fields("difference", report.difference, std::string());
}

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

void compare_checksums(std::vector<RandomReport>& reports) {
  for (RandomReport& report : reports) {
    const RandomReport& first = reports.front();
    if (report.passed() && first.passed() && report.result.checksum != first.result.checksum) {
      report.difference = "its checksum is not that on " + first.communicator;
    }
  }
}

std::string to_text(const std::vector<RandomReport>& reports, const TextStyle& style) {
  std::string text;
  for (const RandomReport& report : reports) {
    for (const RandomFailure& failure : report.result.failures) {
      text += failure_text(report, failure, style.width) + "\n";
    }
    if (!report.difference.empty()) {
      text += wrap("the run of seed " + std::to_string(report.seed) + " (" + report.communicator +
                       ") differs: " + report.difference,
                   style.width, 2) +
              "\n\n";
    }
  }
  for (const RandomReport& report : reports) text += last_line(report, style);
  return text;
}

std::string to_json(const std::vector<RandomReport>& reports) {
  return json_text({{"passed", std::ranges::all_of(reports, &RandomReport::passed)},
                    {"results", json_of(reports)}},
                   3);
}

std::vector<RandomReport> parse_random_reports(const std::string& text) {
  std::vector<RandomReport> reports;
  read_output(text, [&](const Json& whole) { read_json(whole.at("results"), reports); });
  return reports;
}

}  // namespace crossdock::cli
