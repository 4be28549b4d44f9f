#include <exception>
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
  PlacedDispatcher dispatcher(group, worlds[0].config, strategy());
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
  PlacedDispatcher dispatcher(group, config, strategy());
  for (const auto& tokens : {small, large, small}) {
    const World world = make_small_world(tokens, 40, 9);
    Trial trial(dispatcher, world, 4, findings);
    run_forward(trial);
    trial.backward();
  }
  return findings;
}

// Two dispatchers of different widths take turns step by step.
void run_in_turn(PlacedDispatcher& a, const World& world_a, PlacedDispatcher& b,
                 const World& world_b, Findings& findings) {
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
  PlacedDispatcher a(group, narrow.config, strategy());
  PlacedDispatcher b(group, wide.config, strategy());
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
  PlacedDispatcher a(group, world.config, strategy());
  PlacedDispatcher b(*other, other_world.config, strategy());
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

namespace {

constexpr std::array kDtypes = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64,
                                DType::kF8E4M3};

// Selects the checks of a routing: every dtype with plain, every variant with fp32, and two
// variants with each other dtype, chosen differently for each routing so that every pair of variant
// and dtype occurs. Partial sums in the row type apply only to rows smaller than fp32.
bool is_wanted(size_t routing, size_t variant, size_t dtype) {
  if (static_cast<Variant>(variant) == Variant::kPartialSumsInRowType) {
    return size_of(kDtypes[dtype]) < size_of(DType::kF32);
  }
  constexpr size_t kOthers = kVariantNames.size() - 2;  // without plain and the last
  if (variant == 0 || dtype == 0) return true;
  const size_t turn = (variant - 1 + routing + 2 * dtype) % kOthers;
  return turn == 0 || turn == kOthers / 2;
}

// The short run has every routing, every variant and every dtype, but few combinations.
bool is_quick(size_t routing, size_t variant, size_t dtype) {
  return (routing + 2 * variant + dtype) % 3 == 0;
}

std::vector<Check> list_routings() {
  std::vector<Check> checks;
  for (size_t routing = 0; routing < kRoutingNames.size(); ++routing) {
    for (size_t dtype = 0; dtype < kDtypes.size(); ++dtype) {
      for (size_t variant = 0; variant < kVariantNames.size(); ++variant) {
        if (!is_wanted(routing, variant, dtype)) continue;
        const auto make = [=](int num_ranks) {
          return make_world(static_cast<RoutingKind>(routing), static_cast<Variant>(variant),
                            kDtypes[dtype], num_ranks);
        };
        checks.push_back({"routing/" + make(1).name, is_quick(routing, variant, dtype),
                          [=](Group& group, const StrategyFactory& strategy) {
                            return judge(group, strategy, make(group.size()));
                          }});
      }
    }
  }
  return checks;
}

}  // namespace

std::vector<Check> list_checks() {
  std::vector<Check> checks = list_worked_vectors();
  for (auto& part : {list_routings(), list_scenarios(), list_partial_sums(), list_given_outputs(),
                     list_bad_inputs(), list_mismatches()}) {
    checks.insert(checks.end(), part.begin(), part.end());
  }
  return checks;
}

Report run_checks(Group& group, const StrategyFactory& strategy, std::span<const Check> checks,
                  const Progress& progress) {
  Report report;
  for (const Check& check : checks) {
    if (progress) progress(check);
    ++report.num_checks;
    Findings findings;
    try {
      findings = check.body(group, strategy);
    } catch (const std::exception& e) {
      findings.push_back(concat("rank ", group.rank(), ": ", e.what()));
    }
    for (std::string& message : findings) {
      report.failures.push_back({check.name, std::move(message)});
    }
    if (group.is_poisoned()) break;
  }
  return report;
}

}  // namespace crossdock::conformance
