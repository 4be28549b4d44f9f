#include "cli/verify/run.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "cli/device/tensor_place.hpp"
#include "cli/text/wait_notice.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/testing/layer_worlds.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::cli {
namespace {

using conformance::Check;
using conformance::Failure;
using conformance::Report;

// "routing/skewed/bf16/plain" has the part "bf16".
bool has_part(const std::string& name, const std::string& part) {
  return ("/" + name + "/").find("/" + part + "/") != std::string::npos;
}

bool is_selected(const Check& check, const CheckFilter& filter) {
  const auto any = [](const std::vector<std::string>& list, const auto& test) {
    return list.empty() || std::any_of(list.begin(), list.end(), test);
  };
  return (check.is_quick || !filter.is_quick) &&
         any(filter.names, [&](const auto& name) { return matches(check.name, name); }) &&
         any(filter.dtypes, [&](const auto& dtype) { return has_part(check.name, dtype); });
}

// Dispatchers of the check keep their tensors on the rank's GPU.
void move_to_gpus(Check& check) {
  check.body = [body = check.body](Group& group, const StrategyFactory& strategy) {
    return body(group, [&] { return conformance::on_device(strategy(), tensor_places("cuda")); });
  };
}

std::vector<Check> list_layer_checks(const std::string& device) {
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16, DType::kF16};
  if (device == "cpu") dtypes.push_back(DType::kF64);
  return conformance::list_layer_checks(dtypes, tensor_places(device));
}

// Failures as text: a line with the check and a line with the message.
std::string to_text(const std::vector<Failure>& failures) {
  std::string text;
  for (const Failure& failure : failures) {
    std::string message = failure.message;
    std::replace(message.begin(), message.end(), '\n', ' ');
    text += failure.check + "\n" + message + "\n";
  }
  return text;
}

void append_from_text(std::span<const std::byte> body, std::vector<Failure>& failures) {
  const std::string text(reinterpret_cast<const char*>(body.data()), body.size());
  size_t begin = 0;
  const auto next_line = [&] {
    const size_t end = text.find('\n', begin);
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    return line;
  };
  while (begin < text.size()) {
    Failure& failure = failures.emplace_back();
    failure.check = next_line();
    failure.message = next_line();
  }
}

}  // namespace

bool matches(const std::string& name, const std::string& pattern) {
  return name.find(pattern) != std::string::npos || fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

std::vector<Check> select_checks(const CheckFilter& filter, const std::string& device) {
  std::vector<Check> checks = conformance::list_checks();
  if (device == "cuda") std::ranges::for_each(checks, move_to_gpus);
  std::ranges::move(list_layer_checks(device), std::back_inserter(checks));
  std::erase_if(checks, [&](const Check& check) { return !is_selected(check, filter); });
  return checks;
}

VerifyResult verify_on(Group& group, const VerifyCell& cell, const std::vector<Check>& checks,
                       const CheckProgress& progress) {
  const auto begin = std::chrono::steady_clock::now();
  int64_t number = 0;
  const Report report = conformance::run_checks(
      group, [&] { return make_strategy(cell.strategy); }, checks,
      [&](const Check& check) {
        if (group.rank() == 0) progress(++number, check);
      });
  VerifyResult result{.cell = cell,
                      .num_selected = std::ssize(checks),
                      .num_checks = report.num_checks,
                      .seconds = 0,
                      .failures = {}};
  if (group.is_poisoned()) {  // every rank has the same failures
    result.failures = report.failures;
  } else {
    const std::string own = to_text(report.failures);
    const Agreement all =
        group.agree({.operation = "verify", .body = std::as_bytes(std::span(own))});
    for (int rank = 0; rank < group.size(); ++rank) {
      append_from_text(all.body(rank), result.failures);
    }
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

VerifyResult verify_on_threads(const VerifyCell& cell, const std::vector<Check>& checks,
                               const CheckProgress& progress) {
  VerifyResult result;
  run_ranks(cell.ranks,
            [&](Group& group) {
              VerifyResult own = verify_on(group, cell, checks, progress);
              if (group.rank() == 0) result = std::move(own);
            },
            {.ranks_per_node = cell.ranks_per_node, .group = {.on_wait = print_wait_notice}});
  return result;
}

}  // namespace crossdock::cli
