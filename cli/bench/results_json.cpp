#include "cli/bench/results_json.hpp"

#include <nlohmann/json.hpp>
#include <utility>

#include "cli/json_writer.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

using bench::Result;
using bench::Scenario;
using bench::StepResult;

void write(JsonWriter& writer, const StepResult& step) {
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

void write(JsonWriter& writer, const Result& result) {
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
    write(writer, step);
  }
  writer.end_object();
  writer.end_object();
}

StepResult parse_step(const std::string& name, const nlohmann::ordered_json& step) {
  return {.name = name,
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
          .link_bytes = step.value("link_bytes", int64_t{0})};
}

Result parse_result(const nlohmann::ordered_json& entry) {
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
    result.steps.push_back(parse_step(name, step));
  }
  return result;
}

}  // namespace

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

void write_json(JsonWriter& writer, const std::vector<Result>& results) {
  writer.begin_array();
  for (const Result& result : results) write(writer, result);
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
      results.push_back(parse_result(entry));
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInternal, std::string("results of the ranks: ") + error.what());
  }
  return results;
}

}  // namespace crossdock::cli
