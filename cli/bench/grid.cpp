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

// A cell per title of the grid.
std::vector<std::string> row_of(const Grid& grid, const Result& result) {
  std::vector<std::string> row;
  for (const std::string& title : grid.titles) {
    const auto size = std::ranges::find(size_columns(), title, &SizeColumn::title);
    row.push_back(row.size() < grid.num_sizes ? size->value(result)
                                              : cell_of(result, title, grid.has_floors));
  }
  return row;
}

// How many columns from `first` fit the width, after those of the sizes.
size_t end_of_part(const Grid& grid, const std::vector<int>& widths, size_t first, int room) {
  constexpr int kGap = 2;  // before each column
  for (size_t i = 0; i < grid.num_sizes; ++i) room -= widths[i] + kGap;
  size_t end = first;
  while (end < grid.titles.size() && (end == first || widths[end] + kGap <= room)) {
    room -= widths[end++] + kGap;
  }
  return end;
}

// The sizes and the steps of columns [first, end), with these rows.
Table part_of(const Grid& grid, const std::vector<int>& widths, size_t first, size_t end,
              const TextStyle& style, std::span<const std::vector<std::string>> rows) {
  std::vector<size_t> shown;
  for (size_t i = 0; i < grid.num_sizes; ++i) shown.push_back(i);
  for (size_t i = first; i < end; ++i) shown.push_back(i);
  std::vector<Column> columns;
  columns.reserve(shown.size());
  for (const size_t i : shown) columns.push_back({.title = grid.titles[i], .min_width = widths[i]});
  Table table(style, columns);
  for (const auto& row : rows) {
    std::vector<Cell> cells;
    cells.reserve(shown.size());
    for (const size_t i : shown) cells.emplace_back(row[i]);
    table.add_row(std::move(cells));
  }
  return table;
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
  grid.has_floors = any([](const StepResult& step) { return step.floor_us > 0; });
  const bool has_copies = any([](const StepResult& step) { return step.ratio() > 0; });
  grid.unit = grid.has_floors ? "us (x floor)" : has_copies ? "us (x copy)" : "us";
  if (first.link_rate > 0) grid.unit = "us (link GB/s, or x copy)";
  if (first.gpus > 0) grid.heading += "; " + wire_text(first);
  for (const StepResult& step : first.steps) grid.titles.push_back(step.name);
  for (const Result& result : results) grid.rows.push_back(row_of(grid, result));
  return grid;
}

GridPrinter::GridPrinter(Grid sweep, const TextStyle& style)
    : grid_(std::move(sweep)), style_(style) {
  constexpr int kLeastOfStep = 13;  // "12345 (12.34)"
  for (size_t i = 0; i < grid_.titles.size(); ++i) {
    int& width = widths_.emplace_back(display_width(grid_.titles[i]));
    if (i >= grid_.num_sizes) width = std::max(width, kLeastOfStep);
    for (const auto& row : grid_.rows) width = std::max(width, display_width(row[i]));
  }
  end_ = end_of_part(grid_, widths_, grid_.num_sizes, style_.width);
  grid_.rows.clear();
}

std::string GridPrinter::head() const {
  return "\n" + wrap(grid_.heading + "; median " + grid_.unit, style_.width, 2) + "\n" +
         part_of(grid_, widths_, grid_.num_sizes, end_, style_, {}).head();
}

std::string GridPrinter::add(const Result& result) {
  grid_.rows.push_back(row_of(grid_, result));
  return part_of(grid_, widths_, grid_.num_sizes, end_, style_, std::span(grid_.rows).last(1))
      .rows();
}

std::string GridPrinter::rest() const {
  std::string text;
  for (size_t first = end_, end = 0; first < grid_.titles.size(); first = end) {
    end = end_of_part(grid_, widths_, first, style_.width);
    text += part_of(grid_, widths_, first, end, style_, grid_.rows).text();
  }
  return text;
}

std::string grid_text(std::span<const Result> results, const TextStyle& style) {
  GridPrinter printer(make_grid(results), style);
  std::string text = printer.head();
  for (const Result& result : results) text += printer.add(result);
  return text + printer.rest();
}

}  // namespace crossdock::cli
