// If no thread can be started, all ranks get the same error. How many threads a layer starts.
#include "support/missing_threads.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "layer/layer_cases.hpp"

namespace crossdock {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kRanks = 3;
constexpr int kCulprit = 1;

// Many local experts, so a dispatch has many chunks.
LayerCase case_of_many_chunks(bool with_shared) {
  LayerCaseOptions options = list_layer_cases(kRanks)[0].options;
  options.config.router.num_experts = 24;
  options.config.overlap_chunks = with_shared ? 1 : 8;
  options.config.shared_inner = with_shared ? 4 : 0;
  return make_case(options);
}

TEST(MissingThreads, APoolThatCannotStartItsThreadsIsAnErrorAndEndsThoseItStarted) {
  for (const int num_granted : {0, 1, 4}) {
    const MissingThreads missing(num_granted);
    EXPECT_THAT([] { const ThreadPool pool(5); },
                ThrowsMessage<Error>(
                    AllOf(HasSubstr("cannot start a thread"),
                          HasSubstr("for a pool of 5, which has " + std::to_string(num_granted)))));
  }
  const ThreadPool pool(5);
}

TEST(MissingThreads, OverlapWithoutAThreadIsTheSameErrorOnAllRanks) {
  for (const bool with_shared : {false, true}) {
    const LayerCase layer_case = case_of_many_chunks(with_shared);
    const std::vector<RankResult> wanted = run_layer_on_threads(layer_case);
    std::optional<MissingThreads> missing;
    run_ranks(kRanks, [&](Group& group) {
      std::string message = "nothing was thrown";
      const auto expect_refused = [&] {
        try {
          run_layer(group, layer_case);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
          message = error.what();
        }
        EXPECT_THAT(message, AllOf(HasSubstr("rank 0: cannot start a thread"),
                                   HasSubstr("for the overlap of a layer")));
        EXPECT_FALSE(group.is_poisoned());
      };
      group.agree({.operation = "before"});
      if (group.rank() == kCulprit) missing.emplace();
      group.agree({.operation = "missing"});
      expect_refused();
      group.agree({.operation = "after"});
      if (group.rank() == kCulprit) missing.reset();
      group.agree({.operation = "again"});
      EXPECT_EQ(find_difference(run_layer(group, layer_case),
                                wanted[static_cast<size_t>(group.rank())], 0.0),
                "");
    });
  }
}

TEST(MissingThreads, ALayerStartsOneThreadForAllItsCalls) {
  for (const bool with_shared : {false, true}) {
    const LayerCase layer_case = case_of_many_chunks(with_shared);
    run_ranks(1, [&](Group& group) {
      const LayerCase alone = spread(layer_case, {18});
      const int64_t before = num_threads_started();
      LayerOnRank rank(group, alone);
      EXPECT_EQ(num_threads_started(), before);
      for (int repeat = 0; repeat < 3; ++repeat) {
        MoeForwardResult forward = rank.forward();
        rank.backward(forward.saved);
      }
      EXPECT_EQ(num_threads_started(), before + 1);
    });
  }
}

}  // namespace
}  // namespace crossdock
