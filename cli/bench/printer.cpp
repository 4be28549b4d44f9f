#include "cli/bench/printer.hpp"

#include <iostream>
#include <utility>

#include "cli/bench/documents.hpp"
#include "cli/bench/grid.hpp"
#include "cli/bench/report.hpp"
#include "cli/bench/results_json.hpp"

namespace crossdock::cli {

BenchPrinter::BenchPrinter(BenchFormat format, RunDescription run, bool is_sweep)
    : format_(format), run_(std::move(run)), is_sweep_(is_sweep) {}

void BenchPrinter::add(const bench::Scenario& scenario, const bench::Result& result) {
  if (format_ == BenchFormat::kCsv) {
    print_head();
    std::cout << csv_lines(result) << std::flush;
  } else if (format_ == BenchFormat::kTable && !is_sweep_) {
    print_table(scenario, result);
  } else {
    const bool is_table = format_ == BenchFormat::kTable;
    if (is_table && !results_.empty() && !is_same_sweep(results_.back(), result)) {
      print_pending_grid();
    }
    results_.push_back(result);
  }
}

void BenchPrinter::finish() {
  switch (format_) {
    case BenchFormat::kTable:
      return print_pending_grid();
    case BenchFormat::kCsv:
      return;
    case BenchFormat::kMarkdown:
      std::cout << to_markdown(run_, results_, is_sweep_);
      return;
    case BenchFormat::kJson:
      std::cout << cli::to_json(run_, results_) << "\n";
      return;
    case BenchFormat::kResults:
      std::cout << cli::to_json(results_) << "\n";
      return;
  }
}

void BenchPrinter::abandon() {
  const bool is_json = format_ == BenchFormat::kJson || format_ == BenchFormat::kResults;
  if (is_json || (format_ == BenchFormat::kMarkdown && results_.empty())) return;
  finish();
  std::cout << std::flush;
}

void BenchPrinter::print_head() {
  if (has_head_) return;
  has_head_ = true;
  std::cout << (format_ == BenchFormat::kCsv ? csv_head(run_) : description_text(run_, style_));
}

void BenchPrinter::print_table(const bench::Scenario& scenario, const bench::Result& result) {
  print_head();
  if (last_scenario_ != scenario.name) std::cout << head_text(scenario, style_);
  last_scenario_ = scenario.name;
  std::cout << result_text(result, style_) << std::flush;
}

void BenchPrinter::print_pending_grid() {
  if (results_.empty()) return;
  print_head();
  std::cout << grid_text(make_grid(results_), style_) << std::flush;
  results_.clear();
}

}  // namespace crossdock::cli
