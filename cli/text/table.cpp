#include "cli/text/table.hpp"

#include <algorithm>

#include "cli/text/bars.hpp"
#include "cli/text/layout.hpp"

namespace crossdock::cli {
namespace {

constexpr int kGap = 2;  // between columns
constexpr int kLongestBar = 24;
constexpr int kShortestBar = 8;

std::string spaces(int count) {
  return std::string(static_cast<size_t>(std::max(0, count)), ' ');
}

void remove_spaces_at_end(std::string& line) {
  line.erase(line.find_last_not_of(' ') + 1);
}

}  // namespace

Cell Cell::bar(double part) {
  Cell cell("", Colour::kCyan);
  cell.bar_part = part;
  return cell;
}

Cell Cell::line(const std::string& words) {
  Cell cell(words);
  cell.is_line = true;
  return cell;
}

Table::Table(const TextStyle& style, std::vector<Column> columns, int indent)
    : style_(style), columns_(std::move(columns)), indent_(indent) {
  for (const Column& column : columns_) {
    widths_.push_back(std::max(column.min_width, display_width(column.title)));
  }
}

void Table::add_group(const std::string& title, size_t first, size_t count) {
  groups_.push_back({.title = title, .first = first, .count = count});
}

void Table::add_line(const std::string& words) {
  rows_.push_back({Cell::line(words)});
}

void Table::add_row(std::vector<Cell> cells) {
  for (size_t i = 0; i < cells.size(); ++i) {
    const bool wraps = i + 1 == columns_.size() && columns_[i].align == Align::kLeft;
    if (!wraps) widths_[i] = std::max(widths_[i], display_width(cells[i].text));
  }
  rows_.push_back(std::move(cells));
}

int Table::total_width(const std::vector<bool>& shown) const {
  int total = indent_ - kGap;
  for (size_t i = 0; i < columns_.size(); ++i) total += shown[i] ? widths_[i] + kGap : 0;
  return total;
}

std::vector<bool> Table::shown_columns() const {
  std::vector<bool> shown(columns_.size(), true);
  for (size_t i = columns_.size(); i-- > 0 && total_width(shown) > style_.width;) {
    if (columns_[i].is_optional) shown[i] = false;
  }
  return shown;
}

// `width`: of the column; `room`: from here to the end of the line.
std::string Table::draw(const Cell& cell, const Column& column, int width, int room) const {
  if (cell.bar_part >= 0) {
    const int longest = std::clamp(room, kShortestBar, kLongestBar);
    return paint(cli::bar(cell.bar_part, longest, style_.has_blocks), cell.colour, style_);
  }
  const std::string fill = spaces(width - display_width(cell.text));
  const std::string words = paint(cell.text, cell.colour, style_);
  return column.align == Align::kLeft ? words + fill : fill + words;
}

std::string Table::line(const std::vector<Cell>& cells) const {
  const std::vector<bool> shown = shown_columns();
  std::string text = spaces(indent_);
  int begin = indent_;
  for (size_t i = 0; i < cells.size(); ++i) {
    if (!shown[i]) continue;
    if (begin > indent_) text += spaces(kGap);
    std::string drawn = draw(cells[i], columns_[i], widths_[i], style_.width - begin);
    if (i + 1 == columns_.size() && columns_[i].align == Align::kLeft) {
      drawn = wrap(drawn, style_.width - begin, 0);
      for (size_t end = 0; (end = drawn.find('\n', end)) != std::string::npos; ++end) {
        drawn.insert(end + 1, spaces(begin));
      }
    }
    text += drawn;
    begin += widths_[i] + kGap;
  }
  remove_spaces_at_end(text);
  return text + "\n";
}

std::string Table::head() const {
  std::string text;
  if (!groups_.empty()) {
    // Each title ends where its last column does.
    int column = 0;
    for (const Group& group : groups_) {
      int end = indent_ - kGap;
      for (size_t i = 0; i < group.first + group.count; ++i) end += widths_[i] + kGap;
      text += spaces(end - column - display_width(group.title)) + group.title;
      column = end;
    }
    text += "\n";
  }
  std::vector<Cell> titles;
  for (const Column& column : columns_) titles.emplace_back(column.title, Colour::kBold);
  const std::string line_of_titles = line(titles);
  return line_of_titles == "\n" ? text : text + line_of_titles;
}

std::string Table::rows() const {
  std::string text;
  for (const std::vector<Cell>& row : rows_) {
    const bool is_line = row.size() == 1 && row.front().is_line;
    text += is_line ? wrap(row.front().text, style_.width, indent_) + "\n" : line(row);
  }
  return text;
}

}  // namespace crossdock::cli
