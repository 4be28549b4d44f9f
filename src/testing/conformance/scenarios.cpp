#include <memory>
#include <numeric>

#include "core/check.hpp"
#include "testing/conformance/checks.hpp"
#include "testing/conformance/trial.hpp"
#include "testing/conformance/values.hpp"
#include "testing/conformance/worlds.hpp"

namespace crossdock::conformance {
namespace {

std::vector<int64_t> equal_counts(const Group& group, int64_t num_tokens) {
  return std::vector<int64_t>(static_cast<size_t>(group.size()), num_tokens);
}

void run_forward(Trial& trial) {
  trial.dispatch();
  trial.combine();
}

// F0 F1 B0 F2 B1 B2
Findings plans_in_flight(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  std::vector<World> worlds;
  for (uint64_t step = 0; step < 3; ++step) {
    std::vector<int64_t> tokens = equal_counts(group, 4 + static_cast<int64_t>(step));
    tokens[step % tokens.size()] = 0;
    worlds.push_back(make_small_world(tokens, 24, step));
  }
  Dispatcher dispatcher(group, worlds[0].config, strategy());
  Trial first(dispatcher, worlds[0], 1, findings);
  run_forward(first);
  Trial second(dispatcher, worlds[1], 2, findings);
  run_forward(second);
  first.backward();
  Trial third(dispatcher, worlds[2], 3, findings);
  run_forward(third);
  second.backward();
  third.backward();
  return findings;
}

// From a small to a large batch on one rank only, and back.
Findings growth_on_one_rank(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  const std::vector<int64_t> small = equal_counts(group, 2);
  std::vector<int64_t> large = small;
  large[large.size() / 2] = 700;
  const DispatchConfig config = make_small_world(small, 40, 0).config;
  Dispatcher dispatcher(group, config, strategy());
  for (const auto& tokens : {small, large, small}) {
    const World world = make_small_world(tokens, 40, 9);
    Trial trial(dispatcher, world, 4, findings);
    run_forward(trial);
    trial.backward();
  }
  return findings;
}

// Two dispatchers of different widths take turns step by step.
void run_in_turn(Dispatcher& a, const World& world_a, Dispatcher& b, const World& world_b,
                 Findings& findings) {
  Trial trial_a(a, world_a, 5, findings);
  Trial trial_b(b, world_b, 6, findings);
  trial_b.dispatch();
  trial_a.dispatch();
  trial_a.combine();
  trial_b.combine();
  trial_b.backward();
  trial_a.backward();
}

Findings two_widths(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  const World narrow = make_small_world(equal_counts(group, 5), 3, 1);
  const World wide = make_small_world(equal_counts(group, 6), 200, 2);
  Dispatcher a(group, narrow.config, strategy());
  Dispatcher b(group, wide.config, strategy());
  run_in_turn(a, narrow, b, wide, findings);
  return findings;
}

Findings two_groups(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  std::vector<int> members(static_cast<size_t>(group.size()));
  std::iota(members.begin(), members.end(), 0);
  const std::unique_ptr<Group> other = group.subgroup(members);
  const World world = make_small_world(equal_counts(group, 5), 8, 3);
  const World other_world = make_small_world(equal_counts(group, 7), 16, 4);
  Dispatcher a(group, world.config, strategy());
  Dispatcher b(*other, other_world.config, strategy());
  run_in_turn(a, world, b, other_world, findings);
  return findings;
}

// Even and odd ranks as two groups, at the same time.
Findings subgroups(Group& group, const StrategyFactory& strategy) {
  std::vector<int> members;
  for (int r = group.rank() % 2; r < group.size(); r += 2) members.push_back(r);
  const std::unique_ptr<Group> half = group.subgroup(members);
  const World world = make_small_world(equal_counts(*half, 6), 12, 5);
  Findings findings = judge(*half, strategy, world);
  group.agree({.operation = "conformance"});
  return findings;
}

// One token, so that most experts have no rows.
Findings kept_segments(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  for (const int64_t alignment : {1, 8}) {
    std::vector<int64_t> tokens = equal_counts(group, 0);
    tokens.back() = 1;
    World world = make_small_world(tokens, 12, 8);
    world.config.keep_empty_segments = true;
    world.config.alignment = alignment;
    const Findings more = judge(group, strategy, world);
    findings.insert(findings.end(), more.begin(), more.end());
  }
  return findings;
}

Findings same_bits_for_any_ranks(Group& group, const StrategyFactory& strategy) {
  const uint64_t hash = output_hash(group, strategy);
  if (hash == expected_output_hash()) return {};
  return {concat("rank ", group.rank(), ": the output's hash is ", hash, ", must be ",
                 expected_output_hash())};
}

}  // namespace

std::vector<Check> list_scenarios() {
  return {{"scenario/plans_in_flight", true, plans_in_flight},
          {"scenario/growth_on_one_rank", true, growth_on_one_rank},
          {"scenario/two_widths", true, two_widths},
          {"scenario/two_groups", true, two_groups},
          {"scenario/subgroups", true, subgroups},
          {"scenario/kept_segments", true, kept_segments},
          {"scenario/same_bits_for_any_ranks", true, same_bits_for_any_ranks}};
}

}  // namespace crossdock::conformance
