#include "cli/bench/report.hpp"

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

#include "cli/json_writer.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

using bench::Result;
using bench::Scenario;
using bench::StepResult;

std::string sizes_of(const Scenario& s) {
  std::ostringstream text;
  text << "P" << s.ranks << " T" << s.tokens << " D" << s.width << " K" << s.top_k << " E"
       << s.experts;
  if (s.inner > 0) text << " F" << s.inner;
  text << " " << name_of(s.dtype);
  if (s.max_sms > 0) text << ", " << s.max_sms << " SMs";
  return text.str();
}

void print_time(std::ostream& out, double us) {
  out << std::right << std::fixed << std::setw(11) << std::setprecision(us < 1000.0 ? 1 : 0) << us;
}

// What part of the library's plain speed the step has, if the library was measured beside it.
double share_of_blas(const Result& result, const StepResult& step) {
  const auto plain = std::ranges::find(result.steps, step.name + "_blas", &StepResult::name);
  return plain == result.steps.end() ? 0.0 : plain->median_us / step.median_us;
}

}  // namespace

void print_scenarios(std::ostream& out, const std::vector<Scenario>& scenarios) {
  for (const Scenario& s : scenarios) {
    out << std::left << std::setw(17) << s.name << std::setw(36) << sizes_of(s) << s.purpose
        << (s.is_default ? " *" : "") << "\n";
  }
  out << "\n* run when no scenario is named. P ranks, T tokens per rank, D width, K experts per "
         "token of E, F inner width; SMs: multiprocessors of a rank.\n";
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

void print_head(std::ostream& out, const Scenario& scenario) {
  out << "\n" << scenario.name << ": " << sizes_of(scenario) << "\n";
  out << std::left << std::setw(17) << "strategy" << std::setw(9) << "engine" << std::setw(18)
      << "step" << std::right << std::setw(11) << "median us" << std::setw(11) << "min"
      << std::setw(11) << "max" << std::setw(8) << "GB/s" << std::setw(11) << "copy us"
      << std::setw(8) << "ratio" << std::setw(12) << "traffic us" << std::setw(8) << "ratio"
      << "\n";
}

void print_result(std::ostream& out, const Result& result) {
  for (const StepResult& step : result.steps) {
    out << std::left << std::setw(17) << result.strategy << std::setw(9) << result.communicator
        << std::setw(18) << step.name;
    print_time(out, step.median_us);
    print_time(out, step.min_us);
    print_time(out, step.max_us);
    out << std::setw(8) << std::setprecision(1)
        << static_cast<double>(step.bytes) / step.median_us * 1e-3;
    print_time(out, step.copy_us);
    out << std::setw(8) << std::setprecision(2) << step.ratio();
    if (step.traffic_us > 0.0) {
      out << " ";
      print_time(out, step.traffic_us);
      out << std::setw(8) << std::setprecision(2) << step.traffic_ratio();
    }
    if (step.gflops > 0.0) out << "  " << std::setprecision(0) << step.gflops << " GFLOP/s";
    if (const double share = share_of_blas(result, step); share > 0.0) {
      out << ", " << 100.0 * share << " % of BLAS";
    }
    out << "\n";
  }
  if (!result.checked) out << "(results not checked)\n";
  out << std::flush;
}

std::string to_json(const std::vector<Result>& results) {
  JsonWriter writer(3);
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
      writer.field("bytes", step.bytes);
      writer.field("copy_us", step.copy_us);
      writer.field("ratio", step.ratio());
      if (step.traffic_us > 0.0) {
        writer.field("traffic_us", step.traffic_us);
        writer.field("traffic_ratio", step.traffic_ratio());
      }
      if (step.gflops > 0.0) writer.field("gflops", step.gflops);
      writer.end_object();
    }
    writer.end_object();
    writer.end_object();
  }
  writer.end_array();
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
                    .dtype = entry.at("dtype"),
                    .repeat = entry.at("repeat"),
                    .checked = entry.at("checked"),
                    .steps = {}};
      for (const auto& [name, step] : entry.at("steps").items()) {
        result.steps.push_back({.name = name,
                                .median_us = step.at("median_us"),
                                .min_us = step.at("min_us"),
                                .max_us = step.at("max_us"),
                                .bytes = step.at("bytes"),
                                .copy_us = step.at("copy_us"),
                                .traffic_us = step.value("traffic_us", 0.0),
                                .gflops = step.value("gflops", 0.0)});
      }
      results.push_back(std::move(result));
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInternal, std::string("results of the ranks: ") + error.what());
  }
  return results;
}

}  // namespace crossdock::cli
