#include <algorithm>
#include <cstring>
#include <string>

#include "core/check.hpp"
#include "crossdock/testing/random_worlds.hpp"
#include "testing/conformance/values.hpp"

namespace crossdock::testing {
namespace {

// What a rank tells the others: its hash, then "strategy\nfinding\0" for each finding.
std::string to_body(uint64_t bits, const std::vector<std::pair<std::string, std::string>>& found) {
  std::string body(sizeof(bits), '\0');
  std::memcpy(body.data(), &bits, sizeof(bits));
  for (const auto& [strategy, finding] : found) {
    body.append(strategy).append("\n").append(finding).push_back('\0');
  }
  return body;
}

void add_body(std::span<const std::byte> bytes, int rank, CaseVerdict& verdict) {
  uint64_t bits = 0;
  std::memcpy(&bits, bytes.data(), sizeof(bits));
  if (bits != 0) verdict.bits += conformance::hash_of(bits, static_cast<uint64_t>(rank));
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (size_t begin = sizeof(bits); begin < text.size();) {
    const size_t line = text.find('\n', begin);
    const size_t end = text.find('\0', line);
    const std::string strategy = text.substr(begin, line - begin);
    if (verdict.strategy.empty()) verdict.strategy = strategy;
    std::string finding = strategy + ": " + text.substr(line + 1, end - line - 1);
    begin = end + 1;
    // All ranks report the same error.
    if (std::ranges::find(verdict.findings, finding) != verdict.findings.end()) continue;
    verdict.findings.push_back(std::move(finding));
  }
}

}  // namespace

CaseVerdict judge_case(Group& group, const RandomCase& random_case,
                       const std::vector<std::string>& strategies, const StrategyList& candidates,
                       bool on_gpu) {
  const std::string rank = concat("rank ", group.rank(), ": ");
  std::vector<std::pair<std::string, std::string>> found;
  uint64_t bits = 0;
  for (const std::string& strategy : strategies) {
    try {
      CaseOutcome outcome = random_case.run(
          group, {.strategy = strategy, .candidates = candidates, .on_gpu = on_gpu});
      for (std::string& finding : outcome.findings) found.emplace_back(strategy, finding);
      if (bits != 0 && outcome.bits != 0 && outcome.bits != bits) {
        found.emplace_back(
            strategy, concat(rank, "the results have other bits than with ", strategies.front()));
      }
      if (bits == 0) bits = outcome.bits;
    } catch (const std::exception& error) {
      found.emplace_back(strategy, error.what());
      break;
    }
  }
  CaseVerdict verdict;
  try {
    const std::string own = to_body(bits, found);
    const Agreement all =
        group.agree({.operation = "random case", .body = std::as_bytes(std::span(own))});
    for (int r = 0; r < group.size(); ++r) add_body(all.body(r), r, verdict);
  } catch (const Error& error) {
    // The ranks are no longer at the same call.
    group.fail(error);
    for (const auto& [strategy, finding] : found) {
      verdict.findings.push_back(strategy + ": " + finding);
    }
    if (found.empty()) verdict.findings.push_back(rank + error.what());
    verdict.strategy = found.empty() ? strategies.back() : found.front().first;
  }
  if (!verdict.passed()) verdict.bits = 0;
  return verdict;
}

}  // namespace crossdock::testing
