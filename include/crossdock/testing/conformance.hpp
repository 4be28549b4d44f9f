#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/testing/reference.hpp"

/// The suite that every strategy must pass on every communicator, built in or your own: call
/// run_checks(group, your_strategy, list_checks()) on every rank of any group.
namespace crossdock::conformance {

/// Tokens and routes of all ranks. Every rank holds the whole world, computes the reference for all
/// ranks and compares its own part.
struct World {
  std::string name;
  DispatchConfig config;
  DType dtype = DType::kF32;                // of tokens; results of fp8 tokens are bf16
  std::vector<reference::RankInput> ranks;  // [P]; judge generates x and grad_out
  bool wide_ids = false;                    // int64 expert ids
  bool dense = false;                       // a dense map; slots must hold ascending experts
  int64_t slots = 0;                        // K of the routes; 0: top_k. May exceed top_k only if
                                            // dense
  /// true: values whose sums are exact in any order; false: values whose sums depend on the order.
  bool exact_sums = false;
  /// Of the given weights; default: fp64 for fp64 tokens, which require it, else fp32.
  std::optional<DType> weight_dtype{};
  int64_t num_chunks = 2;      // of the dispatch in chunks
  bool awaits_chunks = false;  // it gets them from begin_dispatch and next_chunk, not on_chunk
  uint64_t seed = 100;         // of the values

  int64_t num_slots() const { return slots > 0 ? slots : config.top_k; }
};

/// Problems that a rank found; empty if there are none.
using Findings = std::vector<std::string>;

/// Runs a world forward and backward and compares with the reference, bit for bit where the
/// same-bits contract applies. Collective; all ranks pass the same world.
CROSSDOCK_API Findings judge(Group& group, const StrategyFactory& strategy, const World& world);

/// A property that must hold on any group. Its body is collective.
struct Check {
  std::string name;       // "routing/skewed/bf16/plain", "error/repeated_id", ...
  bool is_quick = false;  // part of the short run
  std::function<Findings(Group&, const StrategyFactory&)> body;
};

/// All checks, in a fixed order.
CROSSDOCK_API std::vector<Check> list_checks();

struct Failure {
  std::string check;
  std::string message;  // begins with the rank
};

struct Report {
  int64_t num_checks = 0;         // checks that ran
  std::vector<Failure> failures;  // of this rank
};

/// Called before each check.
using Progress = std::function<void(const Check&)>;

/// Runs the checks in order. Collective. An exception counts as a failure; once the group is
/// poisoned, the remaining checks do not run.
CROSSDOCK_API Report run_checks(Group& group, const StrategyFactory& strategy,
                                std::span<const Check> checks, const Progress& progress = {});

/// A hash of the bits of `out` for a fixed set of tokens and routes, in global token order. The
/// same for every strategy, communicator and number of ranks. Collective.
CROSSDOCK_API uint64_t output_hash(Group& group, const StrategyFactory& strategy);

/// The value that output_hash must return, computed by the reference.
CROSSDOCK_API uint64_t expected_output_hash();

}  // namespace crossdock::conformance
