#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/text/terminal.hpp"

namespace crossdock::cli {

enum class Align : uint8_t { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kRight;
  int min_width = 0;
  bool is_optional = false;  // dropped if the table would be too wide
};

struct Cell {
  Cell(std::string words) : text(std::move(words)) {}  // NOLINT(google-explicit-constructor)
  Cell(const char* words) : text(words) {}             // NOLINT(google-explicit-constructor)
  Cell(std::string words, Colour words_colour) : text(std::move(words)), colour(words_colour) {}
  /// A horizontal bar that fills `part`, in [0, 1], of the room left in the line. Must be the last
  /// cell of its row.
  static Cell bar(double part);
  /// A text across all columns; the only cell of its row.
  static Cell line(const std::string& words);

  std::string text;
  Colour colour = Colour::kNone;
  double bar_part = -1;  // negative: no bar
  bool is_line = false;
};

/// Rows of cells in columns as wide as their widest cell. The last column wraps if it is
/// left-aligned. Optional columns are dropped, rightmost first, until the table has the style's
/// width.
class Table {
 public:
  Table(const TextStyle& style, std::vector<Column> columns, int indent = 2);

  /// Puts a title above `count` columns that start at `first`.
  void add_group(const std::string& title, size_t first, size_t count);
  /// A line of text between rows, wrapped.
  void add_line(const std::string& words);
  /// A row may have fewer cells than there are columns.
  void add_row(std::vector<Cell> cells);

  /// Titles; empty if no column has one.
  std::string head() const;
  std::string rows() const;
  std::string text() const { return head() + rows(); }

 private:
  struct Group {
    std::string title;
    size_t first;
    size_t count;
  };

  std::vector<bool> shown_columns() const;
  int total_width(const std::vector<bool>& shown) const;
  std::string line(const std::vector<Cell>& cells) const;
  std::string draw(const Cell& cell, const Column& column, int width, int room) const;

  TextStyle style_;
  std::vector<Column> columns_;
  int indent_;
  std::vector<int> widths_;
  std::vector<Group> groups_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace crossdock::cli
