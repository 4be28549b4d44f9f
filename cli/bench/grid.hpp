#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/result.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {

/// Results of one scenario, strategy and communicator at several sizes: a line per size, a column
/// per step.
struct Grid {
  std::string heading;                         // common to all lines
  std::string unit;                            // of the steps' cells: "us (x copy)"
  std::vector<std::string> titles;             // the sizes that vary, then the steps
  size_t num_sizes = 0;                        // how many titles are sizes
  bool has_floors = false;                     // what ratios in cells compare with; else a copy
  std::vector<std::vector<std::string>> rows;  // a cell per title
};

/// Whether both results belong to the same grid.
bool is_same_sweep(const bench::Result& a, const bench::Result& b);

/// REQUIRES: results is not empty, all of the same sweep.
Grid make_grid(std::span<const bench::Result> results);

/// Tables as wide as the style, of which the first can be printed line by line; steps that do not
/// fit follow in further tables.
class GridPrinter {
 public:
  /// `sweep` has a row for every size, whose other cells are estimates.
  GridPrinter(Grid sweep, const TextStyle& style);

  /// The heading and the titles.
  std::string head() const;
  std::string add(const bench::Result& result);
  /// The other tables, with the rows so far.
  std::string rest() const;

 private:
  Grid grid_;  // with the rows so far
  TextStyle style_;
  std::vector<int> widths_;  // of the columns
  size_t end_;               // of the columns of the first table
};

/// All tables of these results. REQUIRES: as make_grid.
std::string grid_text(std::span<const bench::Result> results, const TextStyle& style);

}  // namespace crossdock::cli
