#include "cli/bench/grid.hpp"

#include <algorithm>
#include <utility>

#include "cli/bench/report.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"

namespace crossdock::cli {
namespace {

using bench::Result;
using bench::StepResult;

// A size of a result, by its name as a title and as a letter.
struct SizeColumn {
  const char* title;
  const char* letter;
  int speed;  // position in the order of bench::sweep, in which the last size changes fastest
  std::string (*value)(const Result&);
};

const std::vector<SizeColumn>& size_columns() {
  static const std::vector<SizeColumn> kColumns = {
      {"ranks", "P", 1, [](const Result& r) { return std::to_string(r.ranks); }},
      {"tokens", "T", 5, [](const Result& r) { return std::to_string(r.tokens); }},
      {"width", "D", 4, [](const Result& r) { return std::to_string(r.width); }},
      {"top_k", "K", 3, [](const Result& r) { return std::to_string(r.top_k); }},
      {"experts", "E", 2, [](const Result& r) { return std::to_string(r.experts); }},
      {"dtype", "", 0, [](const Result& r) { return r.dtype; }}};
  return kColumns;
}

// On a GPU some steps have a floor; the others are compared with a copy.
std::string cell_of(const Result& result, const std::string& name, bool has_floors) {
  const auto step = std::ranges::find(result.steps, name, &StepResult::name);
  if (step == result.steps.end()) return "";
  const double ratio = has_floors ? step->floor_ratio() : step->ratio();
  const std::string notes = step->link_bytes > 0 ? fixed(step->link_rate(), 0) + " GB/s"
                            : ratio > 0          ? fixed(ratio, 2)
                                                 : "";
  return microseconds(step->median_us) + (notes.empty() ? "" : " (" + notes + ")");
}

std::vector<int> widths_of(const Grid& grid) {
  std::vector<int> widths;
  for (const std::string& title : grid.titles) widths.push_back(display_width(title));
  for (const auto& row : grid.rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], display_width(row[i]));
  }
  return widths;
}

// The sizes and the steps of columns [first, last).
std::string part_text(const Grid& grid, size_t first, size_t last, const TextStyle& style) {
  std::vector<size_t> shown;
  for (size_t i = 0; i < grid.num_sizes; ++i) shown.push_back(i);
  for (size_t i = first; i < last; ++i) shown.push_back(i);
  std::vector<Column> columns;
  columns.reserve(shown.size());
  for (const size_t i : shown) columns.push_back({.title = grid.titles[i]});
  Table table(style, columns);
  for (const auto& row : grid.rows) {
    std::vector<Cell> cells;
    cells.reserve(shown.size());
    for (const size_t i : shown) cells.emplace_back(row[i]);
    table.add_row(std::move(cells));
  }
  return table.text();
}

}  // namespace

bool is_same_sweep(const Result& a, const Result& b) {
  return a.scenario == b.scenario && a.strategy == b.strategy && a.communicator == b.communicator;
}

Grid make_grid(std::span<const Result> results) {
  const Result& first = results.front();
  Grid grid;
  grid.heading = first.scenario;
  if (first.strategy != "none") grid.heading += ", " + first.strategy;
  if (first.communicator != "none") grid.heading += ", " + first.communicator;
  std::vector<SizeColumn> varying;
  std::string common;
  for (const SizeColumn& size : size_columns()) {
    const std::string value = size.value(first);
    if (std::ranges::any_of(results, [&](const Result& r) { return size.value(r) != value; })) {
      varying.push_back(size);
    } else if (value != "0") {
      common += std::string(common.empty() ? "" : " ") + size.letter + value;
    }
  }
  std::ranges::stable_sort(varying, {}, &SizeColumn::speed);
  for (const SizeColumn& size : varying) grid.titles.emplace_back(size.title);
  if (!common.empty()) grid.heading += ": " + common;
  if (first.max_sms > 0) grid.heading += ", " + std::to_string(first.max_sms) + " SMs";
  grid.num_sizes = grid.titles.size();
  const auto any = [&](auto has_value) { return std::ranges::any_of(first.steps, has_value); };
  const bool has_floors = any([](const StepResult& step) { return step.floor_us > 0; });
  const bool has_copies = any([](const StepResult& step) { return step.ratio() > 0; });
  grid.unit = has_floors ? "us (x floor)" : has_copies ? "us (x copy)" : "us";
  if (first.link_rate > 0) grid.unit = "us (link GB/s, or x copy)";
  if (first.gpus > 0) grid.heading += "; " + wire_text(first);
  for (const StepResult& step : first.steps) grid.titles.push_back(step.name);
  for (const Result& result : results) {
    std::vector<std::string> row;
    row.reserve(grid.titles.size());
    for (const SizeColumn& size : varying) row.push_back(size.value(result));
    for (const StepResult& step : first.steps) {
      row.push_back(cell_of(result, step.name, has_floors));
    }
    grid.rows.push_back(std::move(row));
  }
  return grid;
}

std::string grid_text(const Grid& grid, const TextStyle& style) {
  constexpr int kGap = 2;  // before each column
  const std::vector<int> widths = widths_of(grid);
  int sizes_width = 0;
  for (size_t i = 0; i < grid.num_sizes; ++i) sizes_width += widths[i] + kGap;
  std::string text = "\n" + wrap(grid.heading + "; median " + grid.unit, style.width, 2) + "\n";
  for (size_t first = grid.num_sizes; first < grid.titles.size();) {
    int width = sizes_width;
    size_t last = first;
    while (last < grid.titles.size() &&
           (last == first || width + widths[last] + kGap <= style.width)) {
      width += widths[last++] + kGap;
    }
    text += part_text(grid, first, last, style);
    first = last;
  }
  return text;
}

}  // namespace crossdock::cli
