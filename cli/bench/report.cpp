#include "cli/bench/report.hpp"

#include <algorithm>
#include <sstream>

#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"

namespace crossdock::cli {
namespace {

using bench::Result;
using bench::Scenario;
using bench::StepResult;

std::string sizes_of(const Scenario& s) {
  if (s.kind == bench::ScenarioKind::kAgree) return "P" + std::to_string(s.ranks);
  std::ostringstream text;
  text << "P" << s.ranks << " T" << s.tokens << " D" << s.width << " K" << s.top_k << " E"
       << s.experts;
  if (s.inner > 0) text << " F" << s.inner;
  text << " " << name_of(s.dtype);
  if (s.max_sms > 0) text << ", " << s.max_sms << " SMs";
  return text.str();
}

// Decimals for small numbers, none for large ones.
std::string amount(double value) {
  if (value <= 0.0) return "";
  return fixed(value, value < 10.0 ? 2 : value < 1000.0 ? 1 : 0);
}

bool any(const Result& result, double StepResult::*value) {
  return std::ranges::any_of(result.steps, [=](const auto& step) { return step.*value > 0; });
}

// Steps on a GPU, compared with the least time that memory and tensor cores need.
std::string floors_text(const Result& result, const TextStyle& style) {
  Table table(style, {{.title = "step", .align = Align::kLeft, .min_width = 17},
                      {.title = "median us", .min_width = 9},
                      {.title = "min", .min_width = 8, .is_optional = true},
                      {.title = "max", .min_width = 8, .is_optional = true},
                      {.title = "MB", .min_width = 6},
                      {.title = "GFLOP", .min_width = 6},
                      {.title = "floor us", .min_width = 8},
                      {.title = "x floor", .min_width = 7},
                      {.title = "TFLOP/s", .min_width = 7}});
  for (const StepResult& step : result.steps) {
    table.add_row({step.name, microseconds(step.median_us), microseconds(step.min_us),
                   microseconds(step.max_us), amount(static_cast<double>(step.bytes) * 1e-6),
                   amount(step.flops * 1e-9), amount(step.floor_us), amount(step.floor_ratio()),
                   amount(step.gflops * 1e-3)});
  }
  return table.text();
}

// The step's speed relative to plain calls of the BLAS library, if those were measured too; else 0.
double share_of_blas(const Result& result, const StepResult& step) {
  const auto plain = std::ranges::find(result.steps, step.name + "_blas", &StepResult::name);
  return plain == result.steps.end() ? 0.0 : plain->median_us / step.median_us;
}

// Steps compared with a copy of the same number of bytes.
std::string copies_text(const Result& result, const TextStyle& style) {
  const bool has_traffic = any(result, &StepResult::traffic_us);
  const bool has_products = any(result, &StepResult::gflops);
  std::vector<Column> columns = {{.title = "step", .align = Align::kLeft, .min_width = 17},
                                 {.title = "median us", .min_width = 9},
                                 {.title = "min", .min_width = 8, .is_optional = true},
                                 {.title = "max", .min_width = 8, .is_optional = true},
                                 {.title = "GB/s", .min_width = 6},
                                 {.title = "copy us", .min_width = 8, .is_optional = true},
                                 {.title = "x copy", .min_width = 6}};
  if (has_traffic) {
    columns.push_back({.title = "traffic us", .min_width = 10, .is_optional = true});
    columns.push_back({.title = "x traffic", .min_width = 9});
  }
  if (has_products) columns.insert(columns.end(), {{"GFLOP/s"}, {"% of BLAS"}});
  if (result.link_rate > 0.0) columns.insert(columns.end(), {{"link GB/s"}, {"% of link"}});
  Table table(style, columns);
  for (const StepResult& step : result.steps) {
    std::vector<Cell> cells = {step.name, microseconds(step.median_us), microseconds(step.min_us),
                               microseconds(step.max_us)};
    if (step.bytes > 0) {
      cells.emplace_back(fixed(static_cast<double>(step.bytes) / step.median_us * 1e-3, 1));
      cells.emplace_back(microseconds(step.copy_us));
      cells.emplace_back(fixed(step.ratio(), 2));
    } else {
      cells.insert(cells.end(), {"", "", ""});
    }
    if (has_traffic) {
      const bool is_known = step.traffic_us > 0;
      cells.emplace_back(is_known ? microseconds(step.traffic_us) : "");
      cells.emplace_back(is_known ? fixed(step.traffic_ratio(), 2) : "");
    }
    if (has_products) {
      const double share = share_of_blas(result, step);
      cells.emplace_back(step.gflops > 0 ? fixed(step.gflops, 0) : "");
      cells.emplace_back(share > 0 ? fixed(100.0 * share, 0) : "");
    }
    if (result.link_rate > 0.0) {
      const bool crosses = step.link_bytes > 0;
      cells.emplace_back(crosses ? fixed(step.link_rate(), 1) : "");
      cells.emplace_back(crosses ? fixed(100.0 * step.link_rate() / result.link_rate, 0) : "");
    }
    table.add_row(std::move(cells));
  }
  return table.text();
}

}  // namespace

std::string microseconds(double us) {
  return fixed(us, us < 1000.0 ? 1 : 0);
}

std::string wire_text(const Result& result) {
  if (result.gpus > 1) {
    return std::to_string(result.gpus) + " GPUs, link " + fixed(result.link_rate, 1) +
           " GB/s per GPU and direction";
  }
  return result.ranks > 1 ? "1 GPU, whose memory is the wire" : "1 GPU";
}

std::string scenarios_text(const std::vector<Scenario>& scenarios, const TextStyle& style) {
  Table table(style, {{"", Align::kLeft}, {"", Align::kLeft}}, /*indent=*/0);
  std::string last_purpose;
  for (const Scenario& s : scenarios) {
    const bool is_new = s.purpose != last_purpose;
    last_purpose = s.purpose;
    if (is_new) table.add_line(s.purpose);
    table.add_row({"  " + s.name + (s.is_default ? " *" : ""), sizes_of(s)});
  }
  return table.text() + "\n" +
         wrap(
             "* runs if no scenario is named. P: ranks, T: tokens per rank, D: width, K: experts "
             "per token, E: experts, F: inner width, SMs: multiprocessors per rank.\n",
             style.width);
}

std::string head_text(const Scenario& scenario, const TextStyle& style) {
  return "\n" + paint(scenario.name, Colour::kBold, style) + ": " + sizes_of(scenario) + "\n";
}

std::string case_text(const bench::Case& one) {
  const bool has_strategy = one.strategy != "none";
  return one.scenario.name + " " + sizes_of(one.scenario) +
         (has_strategy ? ", " + one.strategy : "") + ", " + one.communicator;
}

std::string result_text(const Result& result, const TextStyle& style) {
  // One rank alone uses neither a strategy nor a communicator; without rows there is no strategy.
  std::string heading = result.communicator;
  if (result.strategy != "none") heading.insert(0, result.strategy + ", ");
  if (result.ranks == 1 && result.communicator == "none") heading = "1 rank";
  if (result.gpus > 0) heading += ", " + wire_text(result);
  if (!result.checked) heading += " (results not checked)";
  const bool has_floors = any(result, &StepResult::floor_us);
  return heading + "\n" + (has_floors ? floors_text(result, style) : copies_text(result, style));
}

}  // namespace crossdock::cli
