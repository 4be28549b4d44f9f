#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/group.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/testing/reference.hpp"

/// The suite that judges every strategy on every engine, the same for those of Crossdock and for
/// yours: run_checks(group, your_strategy, list_checks()) on every rank of any group.
namespace crossdock::conformance {

/// Tokens and routes of all ranks. Every rank holds the whole world, computes the reference of all
/// of it and compares its own part.
struct World {
  std::string name;
  DispatchConfig config;
  DType dtype = DType::kF32;                // of tokens; results of fp8 tokens are bf16
  std::vector<reference::RankInput> ranks;  // [P]; x and grad_out are made by judge
  bool wide_ids = false;                    // int64 expert ids
  bool dense = false;                       // a dense map; slots must hold ascending experts
  /// Values whose sums are exact in every order; otherwise values whose sums change with the order.
  bool exact_sums = false;
};

/// What a rank found wrong; empty: nothing.
using Findings = std::vector<std::string>;

/// Runs a world forward and backward and compares with the reference: bits, where the same-bits
/// contract fixes them. Collective; all ranks pass the same world.
CROSSDOCK_API Findings judge(Group& group, const StrategyFactory& strategy, const World& world);

/// One thing that must hold on any group. Its body is collective.
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
  int64_t num_checks = 0;         // that ran
  std::vector<Failure> failures;  // of this rank
};

/// Called before each check.
using Progress = std::function<void(const Check&)>;

/// Runs the checks one after the other. Collective. An exception is a failure; if it poisoned the
/// group, the checks behind it do not run.
CROSSDOCK_API Report run_checks(Group& group, const StrategyFactory& strategy,
                                std::span<const Check> checks, const Progress& progress = {});

/// A hash of the bits of `out` of a fixed set of tokens and routes, in global token order. The same
/// for every strategy, engine and number of ranks. Collective.
CROSSDOCK_API uint64_t output_hash(Group& group, const StrategyFactory& strategy);

/// What output_hash must give: computed by the reference.
CROSSDOCK_API uint64_t expected_output_hash();

}  // namespace crossdock::conformance
