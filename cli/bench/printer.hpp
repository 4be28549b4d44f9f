#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/result.hpp"
#include "bench/runner.hpp"
#include "bench/scenario.hpp"
#include "cli/bench/grid.hpp"
#include "cli/bench/run_description.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {

enum class BenchFormat {
  kTable,
  kCsv,
  kMarkdown,
  kJson,     // with the description of the run
  kResults,  // JSON, only the results
};

/// Prints results: lines of CSV and tables as soon as they are complete, other documents at the
/// end. In the table of a sweep, steps that do not fit the width follow when the sweep is complete.
class BenchPrinter {
 public:
  /// `is_sweep`: scenarios run at several sizes, so tables have a line per size.
  BenchPrinter(BenchFormat format, RunDescription run, bool is_sweep,
               std::vector<bench::Case> cases);

  void add(const bench::Scenario& scenario, const bench::Result& result);
  /// Call this after the last result.
  void finish();
  /// Call this instead of finish if the run failed: prints the results so far, except as JSON.
  void abandon();
  /// The same if the user ends the run: also as JSON.
  void interrupt();

 private:
  void print_head();
  void print_table(const bench::Scenario& scenario, const bench::Result& result);
  /// Prints a line of the table of this sweep, after its head if it is the first.
  void add_to_grid(const bench::Result& result);
  void finish_grid();

  BenchFormat format_;
  RunDescription run_;
  bool is_sweep_;
  TextStyle style_ = output_style();
  std::vector<bench::Case> cases_;
  std::vector<bench::Result> results_;  // in the table of a sweep: those of the current one
  std::optional<GridPrinter> grid_;     // of the current sweep
  std::string last_scenario_;           // whose head was printed
  bool has_head_ = false;
};

}  // namespace crossdock::cli
