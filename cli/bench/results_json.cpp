#include "cli/bench/results_json.hpp"

#include <utility>

#include "crossdock/error.hpp"

namespace crossdock::bench {

static void describe(auto& fields, StepResult& step) {
  fields("median_us", step.median_us);
  fields("min_us", step.min_us);
  fields("max_us", step.max_us);
  fields("p10_us", step.p10_us);
  fields("p90_us", step.p90_us);
  fields("bytes", step.bytes);
  fields("copy_us", step.copy_us);
  fields.derived("ratio", step.ratio());
  fields("traffic_us", step.traffic_us, 0.0);
  if (step.traffic_us > 0.0) fields.derived("traffic_ratio", step.traffic_ratio());
  fields("gflops", step.gflops, 0.0);
  fields("flops", step.flops, 0.0);
  fields("floor_us", step.floor_us, 0.0);
  if (step.floor_us > 0.0) fields.derived("floor_ratio", step.floor_ratio());
  fields("link_bytes", step.link_bytes, int64_t{0});
  if (step.link_bytes > 0) fields.derived("link_gb_per_s", step.link_rate());
}

static void describe(auto& fields, Result& result) {
  fields("scenario", result.scenario);
  fields("strategy", result.strategy);
  fields("communicator", result.communicator);
  fields("ranks", result.ranks);
  fields("tokens", result.tokens);
  fields("width", result.width);
  fields("top_k", result.top_k);
  fields("experts", result.experts);
  fields("max_sms", result.max_sms, 0);
  fields("copies", result.copies, std::string("auto"));
  fields("gpus", result.gpus, 0);
  fields("link_rate_gb_per_s", result.link_rate, 0.0);
  fields("dtype", result.dtype);
  fields("repeat", result.repeat);
  fields("checked", result.checked);
}

}  // namespace crossdock::bench

namespace crossdock::cli {

using bench::Result;
using bench::Scenario;
using bench::StepResult;

Json json_of(const std::vector<Result>& results) {
  Json array = Json::array();
  for (const Result& result : results) {
    Json& entry = array.emplace_back(json_of(result));
    Json& steps = entry["steps"] = Json::object();  // by name
    for (const StepResult& step : result.steps) steps[step.name] = json_of(step);
  }
  return array;
}

std::string to_json(const std::vector<Scenario>& scenarios) {
  Json array = Json::array();
  for (const Scenario& s : scenarios) {
    array.push_back({{"scenario", s.name},
                     {"ranks", s.ranks},
                     {"tokens", s.tokens},
                     {"width", s.width},
                     {"top_k", s.top_k},
                     {"experts", s.experts},
                     {"dtype", name_of(s.dtype)},
                     {"default", s.is_default},
                     {"purpose", s.purpose}});
  }
  return json_text(array, 1);
}

std::string to_json(const std::vector<Result>& results) {
  return json_text(json_of(results), 3);
}

std::vector<Result> parse_results(const std::string& text) {
  std::vector<Result> results;
  read_output(text, [&](const Json& array) {
    for (const Json& entry : array) {
      Result& result = results.emplace_back();
      read_json(entry, result);
      for (const auto& [name, step] : entry.at("steps").items()) {
        read_json(step, result.steps.emplace_back());
        result.steps.back().name = name;
      }
    }
  });
  return results;
}

}  // namespace crossdock::cli
