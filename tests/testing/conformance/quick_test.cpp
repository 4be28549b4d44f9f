// The short run of the suite: every strategy, on one rank and on three, on one and two nodes.

#include <gtest/gtest.h>

#include <string>

#include "testing/conformance/expect_conformance.hpp"

namespace crossdock::conformance {
namespace {

class QuickRun : public testing::TestWithParam<std::string> {};

TEST_P(QuickRun, GivesTheReferencesResults) {
  for (const Ranks ranks : {Ranks{1}, Ranks{3}, Ranks{3, 2}}) {
    SCOPED_TRACE(ranks.size);
    expect_no_failures(failures_on_threads(
        ranks, [] { return make_strategy(GetParam()); }, quick_checks()));
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, QuickRun, testing::ValuesIn(strategy_names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace crossdock::conformance
