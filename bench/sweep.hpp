#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/scenario.hpp"
#include "crossdock/dtype.hpp"

/// Sizes that the user gives, instead of those of a scenario.
namespace crossdock::bench {

constexpr int kMaxRuns = 1000;  // of one command, and values of one size

/// The values that each size takes in turn; empty: the scenario's.
struct Sizes {
  std::vector<int64_t> ranks{};    // P
  std::vector<int64_t> tokens{};   // T, per rank
  std::vector<int64_t> width{};    // D
  std::vector<int64_t> top_k{};    // K
  std::vector<int64_t> experts{};  // E
  std::vector<DType> dtypes{};     // fp32, bf16, fp16

  /// Whether a size other than the number of ranks is given.
  bool any_but_ranks() const {
    return !(tokens.empty() && width.empty() && top_k.empty() && experts.empty() && dtypes.empty());
  }
};

/// An option whose values are sizes.
struct SizeOption {
  std::string_view name;  // for messages: "--tokens"
  int64_t least = 1;
  int64_t largest = 0;
};

/// The values of a list whose entries are numbers or ranges: "128:1024:x2" is 128, 256, 512, 1024
/// and "64:200:+64" is 64, 128, 192. Throws Error(kInvalidArgument).
std::vector<int64_t> parse_sizes(const SizeOption& option, const std::vector<std::string>& entries);

/// The scenario at every combination of these sizes. Tokens change fastest, then width, top_k,
/// experts, ranks and dtype. Scenarios for one rank keep it. Throws Error(kInvalidArgument) if
/// there are more than kMaxRuns, or if the scenario cannot have these sizes.
std::vector<Scenario> sweep(const Scenario& scenario, const Sizes& sizes);

}  // namespace crossdock::bench
