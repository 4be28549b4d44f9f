#include "cli/bench/documents.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "cli/bench/grid.hpp"
#include "cli/bench/report.hpp"
#include "cli/bench/results_json.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"

namespace crossdock::cli {
namespace {

using bench::Result;
using bench::StepResult;
using Words = std::vector<std::string>;

double gigabytes_per_second(const StepResult& step) {
  return static_cast<double>(step.bytes) / step.median_us * 1e-3;
}

// Empty if the value is unknown.
std::string known(double value, int digits) {
  return value > 0 ? fixed(value, digits) : "";
}

// The columns of CSV: a title and a step's value.
struct Field {
  const char* title;
  std::string (*value)(const Result&, const StepResult&);
};

const std::vector<Field>& fields() {
  using R = const Result&;
  using S = const StepResult&;
  static const std::vector<Field> kFields = {
      {"scenario", [](R r, S) { return r.scenario; }},
      {"ranks", [](R r, S) { return std::to_string(r.ranks); }},
      {"tokens", [](R r, S) { return std::to_string(r.tokens); }},
      {"width", [](R r, S) { return std::to_string(r.width); }},
      {"top_k", [](R r, S) { return std::to_string(r.top_k); }},
      {"experts", [](R r, S) { return std::to_string(r.experts); }},
      {"dtype", [](R r, S) { return r.dtype; }},
      {"max_sms", [](R r, S) { return r.max_sms > 0 ? std::to_string(r.max_sms) : ""; }},
      {"communicator", [](R r, S) { return r.communicator; }},
      {"strategy", [](R r, S) { return r.strategy; }},
      {"step", [](R, S s) { return s.name; }},
      {"samples", [](R r, S) { return std::to_string(r.repeat); }},
      {"median_us", [](R, S s) { return fixed(s.median_us, 3); }},
      {"min_us", [](R, S s) { return fixed(s.min_us, 3); }},
      {"max_us", [](R, S s) { return fixed(s.max_us, 3); }},
      {"p10_us", [](R, S s) { return fixed(s.p10_us, 3); }},
      {"p90_us", [](R, S s) { return fixed(s.p90_us, 3); }},
      {"bytes", [](R, S s) { return std::to_string(s.bytes); }},
      {"gb_per_s", [](R, S s) { return known(gigabytes_per_second(s), 3); }},
      {"copy_us", [](R, S s) { return known(s.copy_us, 3); }},
      {"ratio", [](R, S s) { return known(s.ratio(), 4); }},
      {"traffic_ratio", [](R, S s) { return known(s.traffic_ratio(), 4); }},
      {"floor_us", [](R, S s) { return known(s.floor_us, 3); }},
      {"floor_ratio", [](R, S s) { return known(s.floor_ratio(), 4); }},
      {"gpus", [](R r, S) { return r.gpus > 0 ? std::to_string(r.gpus) : ""; }},
      {"link_bytes", [](R, S s) { return s.link_bytes > 0 ? std::to_string(s.link_bytes) : ""; }},
      {"link_gb_per_s", [](R, S s) { return known(s.link_rate(), 3); }},
      {"link_rate_gb_per_s", [](R r, S) { return known(r.link_rate, 3); }}};
  return kFields;
}

std::string csv_line(const Words& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : ",") + word;
  return line + "\n";
}

// Cells are right-aligned after the first `num_left`.
std::string markdown_table(const Words& titles, size_t num_left, const std::vector<Words>& rows) {
  std::string text = "|";
  for (const std::string& title : titles) text += " " + title + " |";
  text += "\n|";
  for (size_t i = 0; i < titles.size(); ++i) text += i < num_left ? "---|" : "---:|";
  for (const Words& row : rows) {
    text += "\n|";
    for (const std::string& cell : row) text += " " + cell + " |";
  }
  return text + "\n";
}

std::string steps_in_markdown(const Result& result) {
  const bool has_floors =
      std::ranges::any_of(result.steps, [](const StepResult& step) { return step.floor_us > 0; });
  const bool has_link = result.link_rate > 0;
  Words titles = {"step", "median us", "min",  "p10",
                  "p90",  "max",       "GB/s", has_floors ? "x floor" : "x copy"};
  if (has_link) titles.insert(titles.end(), {"link GB/s", "link rate"});
  std::vector<Words> rows;
  for (const StepResult& step : result.steps) {
    rows.push_back({"`" + step.name + "`", microseconds(step.median_us), microseconds(step.min_us),
                    microseconds(step.p10_us), microseconds(step.p90_us), microseconds(step.max_us),
                    known(gigabytes_per_second(step), 1),
                    known(has_floors ? step.floor_ratio() : step.ratio(), 2)});
    if (has_link) {
      rows.back().push_back(known(step.link_rate(), 1));
      rows.back().push_back(step.link_bytes > 0 ? fixed(result.link_rate, 1) : "");
    }
  }
  return markdown_table(titles, 1, rows);
}

std::string grid_in_markdown(const Grid& grid) {
  Words titles = grid.titles;
  for (size_t i = grid.num_sizes; i < titles.size(); ++i) titles[i] = "`" + titles[i] + "`";
  return markdown_table(titles, grid.num_sizes, grid.rows);
}

}  // namespace

std::string description_text(const RunDescription& run, const TextStyle& style) {
  Table table(style, {{"", Align::kLeft}, {"", Align::kLeft}}, /*indent=*/0);
  for (const auto& [name, value] : facts_of(run)) table.add_row({name, value});
  return table.text();
}

std::string csv_head(const RunDescription& run) {
  std::string text;
  for (const auto& [name, value] : facts_of(run)) {
    text.append("# ").append(name).append(": ").append(value).append("\n");
  }
  Words titles;
  for (const Field& field : fields()) titles.emplace_back(field.title);
  return text + csv_line(titles);
}

std::string csv_lines(const Result& result) {
  std::string text;
  for (const StepResult& step : result.steps) {
    Words line;
    for (const Field& field : fields()) line.push_back(field.value(result, step));
    text += csv_line(line);
  }
  return text;
}

std::string to_markdown(const RunDescription& run, const std::vector<Result>& results,
                        bool is_sweep) {
  std::string text;
  for (const auto& [name, value] : facts_of(run)) {
    const bool is_code = name == "command";
    text += "- " + name + ": " + (is_code ? "`" + value + "`" : value) + "\n";
  }
  for (size_t first = 0, last = 0; first < results.size(); first = last) {
    while (last < results.size() && is_same_sweep(results[first], results[last])) ++last;
    const Grid grid = make_grid(std::span(results).subspan(first, last - first));
    text += "\n### " + grid.heading + "\n\n";
    if (is_sweep) {
      text += "Median " + grid.unit + ":\n\n" + grid_in_markdown(grid);
    } else {
      text += steps_in_markdown(results[first]);
    }
  }
  return text;
}

std::string to_json(const RunDescription& run, const std::vector<Result>& results) {
  return json_text({{"run", json_of(run)}, {"results", json_of(results)}}, 4);
}

}  // namespace crossdock::cli
