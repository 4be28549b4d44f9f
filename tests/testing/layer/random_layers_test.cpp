// Random layers: a new seed in every run. CROSSDOCK_RANDOM_SEED repeats one, CROSSDOCK_RANDOM_CASES
// sets their number.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>

#include "crossdock/testing/layer_fields.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::testing {
namespace {

uint64_t number_from(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : fallback;
}

struct RankOutcomes {
  std::vector<std::string> findings;
  std::vector<uint64_t> bits;  // [P]
};

RankOutcomes run(const RandomCase& layer, const std::string& strategy) {
  std::vector<CaseOutcome> outcomes(static_cast<size_t>(layer.num_ranks));
  RankOutcomes all;
  try {
    run_ranks(layer.num_ranks,
              [&](Group& group) {
                outcomes[static_cast<size_t>(group.rank())] =
                    layer.run(group, {.strategy = strategy, .candidates = built_in_strategies()});
              },
              {.ranks_per_node = layer.ranks_per_node});
  } catch (const std::exception& error) {
    all.findings.emplace_back(error.what());
  }
  for (const CaseOutcome& outcome : outcomes) {
    all.findings.insert(all.findings.end(), outcome.findings.begin(), outcome.findings.end());
    all.bits.push_back(outcome.bits);
  }
  return all;
}

// What is wrong with a case, for all strategies; empty: nothing.
std::string problem_of(const RandomCase& layer) {
  std::vector<uint64_t> bits;
  for (const std::string& strategy : strategy_names()) {
    const RankOutcomes got = run(layer, strategy);
    if (!got.findings.empty()) return strategy + ": " + got.findings[0];
    if (!bits.empty() && got.bits != bits) return strategy + ": other bits";
    bits = got.bits;
  }
  return "";
}

RandomCase case_of(uint64_t seed) {
  const int num_ranks = static_cast<int>(1 + seed % 8);
  const int ranks_per_node = seed % 3 == 0 ? static_cast<int>(1 + seed % 5 % 4) : 0;
  return layer_case(conformance::random_layer_spec(seed, num_ranks), ranks_per_node);
}

// The same problem in the simplest layer that has it.
std::string reduced(RandomCase failing) {
  for (bool found = true; found;) {
    found = false;
    for (const RandomCase& simpler : failing.simpler()) {
      if (problem_of(simpler).empty()) continue;
      failing = simpler;
      found = true;
      break;
    }
  }
  return problem_of(failing) + "\n" + failing.to_file("direct", "threads", "cpu");
}

TEST(RandomLayers, MatchTheReferenceWithTheSameBitsForAllStrategies) {
  const uint64_t first = number_from("CROSSDOCK_RANDOM_SEED", std::random_device()());
  const uint64_t most = number_from("CROSSDOCK_RANDOM_CASES", 300);
  const double limit = static_cast<double>(number_from("CROSSDOCK_RANDOM_SECONDS", 20));
  std::cout << "CROSSDOCK_RANDOM_SEED=" << first << std::endl;
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  uint64_t count = 0;
  for (; count < most && seconds() < limit; ++count) {
    const RandomCase layer = case_of(first + count);
    const std::string problem = problem_of(layer);
    if (problem.empty()) continue;
    ADD_FAILURE() << "seed " << first + count << ": " << problem << "\nreduced: " << reduced(layer);
  }
  std::cout << count << " layers in " << seconds() << " s" << std::endl;
}

}  // namespace
}  // namespace crossdock::testing
