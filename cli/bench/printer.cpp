#include "cli/bench/printer.hpp"

#include <iostream>
#include <utility>

#include "cli/bench/documents.hpp"
#include "cli/bench/grid.hpp"
#include "cli/bench/report.hpp"
#include "cli/bench/results_json.hpp"

namespace crossdock::cli {

BenchPrinter::BenchPrinter(BenchFormat format, RunDescription run, bool is_sweep,
                           std::vector<bench::Case> cases)
    : format_(format), run_(std::move(run)), is_sweep_(is_sweep), cases_(std::move(cases)) {}

void BenchPrinter::add(const bench::Scenario& scenario, const bench::Result& result) {
  if (format_ == BenchFormat::kCsv) {
    print_head();
    std::cout << csv_lines(result) << std::flush;
  } else if (format_ == BenchFormat::kTable && !is_sweep_) {
    print_table(scenario, result);
  } else {
    if (format_ == BenchFormat::kTable) add_to_grid(result);
    results_.push_back(result);
  }
}

void BenchPrinter::finish() {
  switch (format_) {
    case BenchFormat::kTable:
      return finish_grid();
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

void BenchPrinter::interrupt() {
  if (format_ == BenchFormat::kTable || !results_.empty()) finish();
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

void BenchPrinter::add_to_grid(const bench::Result& result) {
  if (!results_.empty() && !is_same_sweep(results_.back(), result)) finish_grid();
  if (!grid_) {
    print_head();
    std::vector<bench::Result> sizes;  // of the whole sweep, with the steps of the first
    for (const bench::Case& one : cases_) {
      bench::Result size = result;
      size.scenario = one.scenario.name;
      size.strategy = one.strategy;
      size.communicator = one.communicator;
      if (!is_same_sweep(size, result)) continue;
      size.ranks = one.scenario.ranks;
      size.tokens = one.scenario.tokens;
      size.width = one.scenario.width;
      size.top_k = one.scenario.top_k;
      size.experts = one.scenario.experts;
      size.dtype = name_of(one.scenario.dtype);
      sizes.push_back(std::move(size));
    }
    grid_.emplace(make_grid(sizes), style_);
    std::cout << grid_->head();
  }
  std::cout << grid_->add(result) << std::flush;
}

void BenchPrinter::finish_grid() {
  if (!grid_) return;
  std::cout << grid_->rest() << std::flush;
  grid_.reset();
  results_.clear();
}

}  // namespace crossdock::cli
