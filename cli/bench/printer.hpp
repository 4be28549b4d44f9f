#pragma once

#include <string>
#include <vector>

#include "bench/result.hpp"
#include "bench/scenario.hpp"
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
/// end.
class BenchPrinter {
 public:
  /// `is_sweep`: scenarios run at several sizes, so tables have a line per size.
  BenchPrinter(BenchFormat format, RunDescription run, bool is_sweep);

  void add(const bench::Scenario& scenario, const bench::Result& result);
  /// Call this after the last result.
  void finish();
  /// Call this instead of finish if the run failed: prints the results so far, except as JSON.
  void abandon();

 private:
  void print_head();
  void print_table(const bench::Scenario& scenario, const bench::Result& result);
  void print_pending_grid();

  BenchFormat format_;
  RunDescription run_;
  bool is_sweep_;
  TextStyle style_ = output_style();
  std::vector<bench::Result> results_;  // in a sweep: those not printed yet
  std::string last_scenario_;           // whose head was printed
  bool has_head_ = false;
};

}  // namespace crossdock::cli
