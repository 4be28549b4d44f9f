// Dispatch in chunks while the experts compute: same bits, same errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "crossdock/extend/forwarding_strategy.hpp"
#include "layer/overlap_cases.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

void expect_same_bits(int P, const ThreadOptions& options = {}) {
  for (const NamedCase& named : list_overlap_cases(P)) {
    for (const std::string& strategy : strategy_names()) {
      LayerCase layer_case = make_case(named.options);
      layer_case.config.strategy = strategy;
      const std::vector<RankResult> wanted = run_layer_on_threads(layer_case, options);
      for (const int64_t num_chunks : kChunkCounts) {
        layer_case.config.overlap_chunks = num_chunks;
        const std::vector<RankResult> got = run_layer_on_threads(layer_case, options);
        for (size_t rank = 0; rank < got.size(); ++rank) {
          EXPECT_EQ(find_difference(got[rank], wanted[rank], 0.0), "")
              << named.name << ", " << strategy << ", " << num_chunks << " chunks, rank " << rank
              << " of " << P;
        }
      }
    }
  }
}

TEST(Overlap, HasTheBitsOfALayerWithoutIt) {
  for (const int P : {1, 2, 4, 7, 8}) expect_same_bits(P);
}

TEST(Overlap, HasTheBitsOfALayerWithoutItOnSeveralNodes) {
  expect_same_bits(4, {.ranks_per_node = 2});
  expect_same_bits(4, {.ranks_per_node = 1});
  expect_same_bits(7, {.ranks_per_node = 3});
  expect_same_bits(8, {.ranks_per_node = 4});
}

TEST(Overlap, WorksWhereEveryRouteIsUnused) {
  LayerCase layer_case = make_case(list_overlap_cases(3).back().options);
  layer_case.mask.assign(layer_case.mask.size(), 1);
  const std::vector<RankResult> wanted = run_layer_on_threads(layer_case);
  layer_case.config.overlap_chunks = 3;
  const std::vector<RankResult> got = run_layer_on_threads(layer_case);
  for (size_t rank = 0; rank < got.size(); ++rank) {
    EXPECT_EQ(find_difference(got[rank], wanted[rank], 0.0), "");
  }
}

TEST(Overlap, IsRecordedChunkByChunk) {
  LayerCaseOptions options = list_layer_cases(2)[0].options;  // 3 experts per rank
  options.config.overlap_chunks = 3;
  const LayerCase layer_case = make_case(options);
  run_ranks(2, [&](Group& group) {
    run_layer(group, layer_case);
    int chunks = 0;
    int forward_parts = 0;
    int backward_parts = 0;
    for (const Event& event : group.recorder().events()) {
      const std::string_view operation = event.operation;
      chunks += operation == "dispatch" && std::string_view(event.phase) == "chunk" ? 1 : 0;
      forward_parts += operation == "experts" ? 1 : 0;
      backward_parts += operation == "experts_dx" ? 1 : 0;
    }
    EXPECT_EQ(chunks, 6) << "forward and backward";
    EXPECT_EQ(forward_parts, 3);
    EXPECT_EQ(backward_parts, 3);
  });
}

TEST(Overlap, MustBeIdenticalOnEveryRank) {
  const LayerCase layer_case = make_case(list_layer_cases(3)[0].options);
  run_ranks(3, [&](Group& group) {
    LayerCase own = layer_case;
    own.config.overlap_chunks = group.rank() == 1 ? 2 : 4;
    expect_refused(group, "overlap_chunks", [&] { run_layer(group, own); });
    own.config.overlap_chunks = 0;
    EXPECT_THROW(run_layer(group, own), Error);
    run_layer(group, layer_case);
  });
}

// Calls `between` after the first chunk of a dispatch has arrived at this rank.
class Interrupted : public ForwardingStrategy {
 public:
  Interrupted(std::string_view name, std::function<void()> between)
      : ForwardingStrategy(make_strategy(name)), between_(std::move(between)) {}
  void scatter_chunks(const StrategyCall& call, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    inner().scatter_chunks(call, parts, chunks, [&](size_t i) {
      arrived(i);
      if (i == 0) between_();
    });
  }

 private:
  std::function<void()> between_;
};

constexpr int kRanks = 3;
constexpr int kCulprit = 1;

// `fault` happens at the culprit after the first chunk of the `nth` dispatch; every rank must end
// in an error that names the culprit and the operation, and the group is poisoned.
void expect_failure(int nth, const std::string& words, const GroupOptions& options,
                    const std::function<void()>& fault) {
  LayerCaseOptions layer_options = list_layer_cases(kRanks)[0].options;
  layer_options.config.overlap_chunks = 2;
  const LayerCase layer_case = make_case(layer_options);
  for (const std::string& strategy : strategy_names()) {
    SCOPED_TRACE(strategy);
    run_ranks(kRanks,
              [&](Group& group) {
                int count = 0;
                const auto between = [&] {
                  if (++count == nth && group.rank() == kCulprit) fault();
                };
                std::string message = "nothing was thrown";
                try {
                  run_layer(group, layer_case,
                            {.strategy = std::make_unique<Interrupted>(strategy, between)});
                } catch (const Error& error) {
                  message = error.what();
                  EXPECT_EQ(error.context().culprit, kCulprit) << "rank " << group.rank();
                  EXPECT_STREQ(error.context().operation, "dispatch") << "rank " << group.rank();
                }
                EXPECT_THAT(message, HasSubstr(words)) << "rank " << group.rank();
                EXPECT_TRUE(group.is_poisoned());
              },
              {.group = options});
  }
}

TEST(OverlapFailure, BetweenTheChunksOfAForwardIsTheSameErrorEverywhere) {
  expect_failure(1, "a fault", {}, [] { throw std::runtime_error("a fault put in on purpose"); });
}

TEST(OverlapFailure, BetweenTheChunksOfABackwardIsTheSameErrorEverywhere) {
  expect_failure(2, "a fault", {}, [] { throw std::runtime_error("a fault put in on purpose"); });
}

}  // namespace
}  // namespace crossdock
