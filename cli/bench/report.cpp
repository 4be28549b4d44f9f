#include "cli/bench/report.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/json_writer.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"
#include "crossdock/error.hpp"

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
  Table table(style, {{"", Align::kLeft}, {"", Align::kLeft}, {"", Align::kLeft}}, /*indent=*/0);
  for (const Scenario& s : scenarios) {
    table.add_row({s.name + (s.is_default ? " *" : ""), sizes_of(s), s.purpose});
  }
  return table.text() + "\n" +
         wrap(
             "* runs if no scenario is named. P: ranks, T: tokens per rank, D: width, K: experts "
             "per token, E: experts, F: inner width, SMs: multiprocessors per rank.\n",
             style.width);
}

std::string to_json(const std::vector<Scenario>& scenarios) {
  JsonWriter writer(1);
  writer.begin_array();
  for (const Scenario& s : scenarios) {
    writer.begin_object();
    writer.field("scenario", std::string_view(s.name));
    writer.field("ranks", s.ranks);
    writer.field("tokens", s.tokens);
    writer.field("width", s.width);
    writer.field("top_k", s.top_k);
    writer.field("experts", s.experts);
    writer.field("dtype", name_of(s.dtype));
    writer.field("default", s.is_default);
    writer.field("purpose", std::string_view(s.purpose));
    writer.end_object();
  }
  writer.end_array();
  return writer.text();
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

void write_json(JsonWriter& writer, const std::vector<Result>& results) {
  writer.begin_array();
  for (const Result& result : results) {
    writer.begin_object();
    writer.field("scenario", std::string_view(result.scenario));
    writer.field("strategy", std::string_view(result.strategy));
    writer.field("communicator", std::string_view(result.communicator));
    writer.field("ranks", result.ranks);
    writer.field("tokens", result.tokens);
    writer.field("width", result.width);
    writer.field("top_k", result.top_k);
    writer.field("experts", result.experts);
    if (result.max_sms > 0) writer.field("max_sms", result.max_sms);
    if (result.copies != "auto") writer.field("copies", std::string_view(result.copies));
    if (result.gpus > 0) writer.field("gpus", result.gpus);
    if (result.link_rate > 0.0) writer.field("link_rate_gb_per_s", result.link_rate);
    writer.field("dtype", std::string_view(result.dtype));
    writer.field("repeat", result.repeat);
    writer.field("checked", result.checked);
    writer.key("steps");
    writer.begin_object();
    for (const StepResult& step : result.steps) {
      writer.key(step.name);
      writer.begin_object();
      writer.field("median_us", step.median_us);
      writer.field("min_us", step.min_us);
      writer.field("max_us", step.max_us);
      writer.field("p10_us", step.p10_us);
      writer.field("p90_us", step.p90_us);
      writer.field("bytes", step.bytes);
      writer.field("copy_us", step.copy_us);
      writer.field("ratio", step.ratio());
      if (step.traffic_us > 0.0) {
        writer.field("traffic_us", step.traffic_us);
        writer.field("traffic_ratio", step.traffic_ratio());
      }
      if (step.gflops > 0.0) writer.field("gflops", step.gflops);
      if (step.floor_us > 0.0) {
        writer.field("flops", step.flops);
        writer.field("floor_us", step.floor_us);
        writer.field("floor_ratio", step.floor_ratio());
      }
      if (step.link_bytes > 0) {
        writer.field("link_bytes", step.link_bytes);
        writer.field("link_gb_per_s", step.link_rate());
      }
      writer.end_object();
    }
    writer.end_object();
    writer.end_object();
  }
  writer.end_array();
}

std::string to_json(const std::vector<Result>& results) {
  JsonWriter writer(3);
  write_json(writer, results);
  return writer.text();
}

std::vector<Result> parse_results(const std::string& json) {
  std::vector<Result> results;
  try {
    for (const auto& entry : nlohmann::ordered_json::parse(json)) {
      Result result{.scenario = entry.at("scenario"),
                    .strategy = entry.at("strategy"),
                    .communicator = entry.at("communicator"),
                    .ranks = entry.at("ranks"),
                    .tokens = entry.at("tokens"),
                    .width = entry.at("width"),
                    .top_k = entry.at("top_k"),
                    .experts = entry.at("experts"),
                    .max_sms = entry.value("max_sms", 0),
                    .copies = entry.value("copies", "auto"),
                    .gpus = entry.value("gpus", 0),
                    .link_rate = entry.value("link_rate_gb_per_s", 0.0),
                    .dtype = entry.at("dtype"),
                    .repeat = entry.at("repeat"),
                    .checked = entry.at("checked"),
                    .steps = {}};
      for (const auto& [name, step] : entry.at("steps").items()) {
        result.steps.push_back({.name = name,
                                .median_us = step.at("median_us"),
                                .min_us = step.at("min_us"),
                                .max_us = step.at("max_us"),
                                .p10_us = step.at("p10_us"),
                                .p90_us = step.at("p90_us"),
                                .bytes = step.at("bytes"),
                                .copy_us = step.at("copy_us"),
                                .traffic_us = step.value("traffic_us", 0.0),
                                .gflops = step.value("gflops", 0.0),
                                .flops = step.value("flops", 0.0),
                                .floor_us = step.value("floor_us", 0.0),
                                .link_bytes = step.value("link_bytes", int64_t{0})});
      }
      results.push_back(std::move(result));
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInternal, std::string("results of the ranks: ") + error.what());
  }
  return results;
}

}  // namespace crossdock::cli
