#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/testing/conformance.hpp"

/// Random cases: made from a seed, judged against the fp64 reference on any group, and reduced when
/// they fail.
namespace crossdock::testing {

using conformance::Findings;
using conformance::World;

/// Numbers that depend only on the seed, identical on every machine.
class RandomNumbers {
 public:
  explicit RandomNumbers(uint64_t seed) : state_(seed) {}

  uint64_t next() {  // splitmix64
    state_ += 0x9e3779b97f4a7c15U;
    uint64_t bits = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9U;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
    return bits ^ (bits >> 31);
  }
  /// In [least, most].
  int64_t in(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(next() % static_cast<uint64_t>(most - least + 1));
  }
  /// True for one number in `n`.
  bool one_in(int64_t n) { return in(1, n) == 1; }
  template <typename Value>
  Value one_of(std::initializer_list<Value> values) {
    return values.begin()[in(0, static_cast<int64_t>(values.size()) - 1)];
  }

 private:
  uint64_t state_;
};

/// What a random case must respect.
struct RandomLimits {
  int num_ranks = 1;  // P, exactly
};

/// How a case runs: identical on every rank.
struct RandomSetting {
  std::string strategy;     // a candidate's name, or "auto"
  StrategyList candidates;  // on GPUs made by conformance::on_device
  bool on_gpu = false;
};

/// The outcome of a case on one rank.
struct CaseOutcome {
  Findings findings;  // empty: passed
  /// Hash of this rank's results, for comparisons between strategies, communicators and devices. 0
  /// if the bits may differ between them.
  uint64_t bits = 0;
};

/// A case of any kind. Copies share their data.
struct RandomCase {
  std::string kind;        // "dispatch" or "layer"
  std::string summary;     // its sizes and options in one line
  int num_ranks = 1;       // of the group it needs
  int ranks_per_node = 0;  // of that group; 0: as the communicator reports

  /// Collective over a group of num_ranks ranks. Throws if a call fails.
  std::function<CaseOutcome(Group&, const RandomSetting&)> run;
  /// Cases that are simpler in one respect each, the most effective first; empty: none is left.
  std::function<std::vector<RandomCase>()> simpler;
  /// The text of a case file that `crossdock eval` runs.
  std::function<std::string(const std::string& strategy, const std::string& communicator,
                            const std::string& device)>
      to_file;
};

/// How a case ended.
struct CaseVerdict {
  std::string strategy;  // the first that failed; empty: passed
  Findings findings;     // of all ranks, if the group still works; else of this rank
  uint64_t bits = 0;     // of all ranks' results; 0 unless passed

  bool passed() const { return findings.empty(); }
};

/// Runs a case with each strategy; their results must have the same bits. An exception is a finding
/// and ends the case. The same verdict on all ranks of the group, unless the group is poisoned
/// afterwards. Collective.
CROSSDOCK_API CaseVerdict judge_case(Group& group, const RandomCase& random_case,
                                     const std::vector<std::string>& strategies,
                                     const StrategyList& candidates, bool on_gpu = false);

/// Simplifies a failing case as long as `fails` accepts a simpler one, at most `most_tries` calls.
/// Deterministic.
CROSSDOCK_API RandomCase reduce(RandomCase failing,
                                const std::function<bool(const RandomCase&)>& fails,
                                int most_tries = 2000);

/// Tokens, routes and options of a dispatcher for limits.num_ranks ranks, made from the seed.
CROSSDOCK_API World random_dispatch_world(uint64_t seed, const RandomLimits& limits);

/// Judges a world as conformance::judge does, with a named strategy.
CROSSDOCK_API CaseOutcome judge_dispatch_world(Group& group, const RandomSetting& setting,
                                               const World& world);

/// Worlds that are simpler in one respect each: with fewer ranks, tokens, experts, slots, a smaller
/// width or one option less. The most effective first.
CROSSDOCK_API std::vector<World> simpler_worlds(const World& world);

}  // namespace crossdock::testing
