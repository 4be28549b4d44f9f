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
  std::vector<std::vector<std::string>> rows;  // a cell per title
};

/// Whether both results belong to the same grid.
bool is_same_sweep(const bench::Result& a, const bench::Result& b);

/// REQUIRES: results is not empty, all of the same sweep.
Grid make_grid(std::span<const bench::Result> results);

/// Tables as wide as the style; steps that do not fit follow in further tables.
std::string grid_text(const Grid& grid, const TextStyle& style);

}  // namespace crossdock::cli
