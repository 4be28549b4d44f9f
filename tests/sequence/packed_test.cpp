#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sequence/layouts.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(PackedSequences, ReadsBothIntegerTypes) {
  const std::vector<int32_t> short_offsets = {0, 3, 3, 5};
  const std::vector<int64_t> long_offsets = {0, 3, 3, 5};
  for (const ConstTensorView& cu_seqlens :
       {ConstTensorView(short_offsets.data(), {4}), ConstTensorView(long_offsets.data(), {4})}) {
    const PackedSequences packed(PackedSequencesArgs{.cu_seqlens = cu_seqlens});
    EXPECT_THAT(packed.starts(), ElementsAre(0, 3, 3, 5));
    EXPECT_THAT(packed.lengths(), ElementsAre(3, 0, 2));
    EXPECT_EQ(packed.num_sequences(), 3);
    EXPECT_EQ(packed.num_tokens(), 5);
  }
}

TEST(PackedSequences, StartWhereThePaddedOnesStart) {
  const PackedSequences packed = pack({3, 0, 2}, 4, 2);
  EXPECT_THAT(packed.starts(), ElementsAre(0, 4, 4, 8));
  EXPECT_THAT(packed.lengths(), ElementsAre(3, 0, 2));
  EXPECT_EQ(packed.num_tokens(), 10);
}

TEST(PackedSequences, MayBeNone) {
  const PackedSequences none;
  EXPECT_EQ(none.num_tokens(), 0);
  const PackedSequences only_padding = pack({}, 1, 7);
  EXPECT_THAT(only_padding.lengths(), IsEmpty());
  EXPECT_EQ(only_padding.num_tokens(), 7);
}

TEST(PackedSequences, RefusesOffsetsWithIndexAndValues) {
  const auto refusal = [](const std::vector<int64_t>& offsets, const std::vector<int64_t>& padded,
                          std::optional<int64_t> num_tokens) {
    const ConstTensorView twin = padded.empty() ? ConstTensorView() : view_of(padded);
    return message_of(
        [&] {
          PackedSequences(PackedSequencesArgs{
              .cu_seqlens = view_of(offsets), .cu_seqlens_padded = twin, .num_tokens = num_tokens});
        },
        ErrorCode::kInvalidArgument);
  };
  EXPECT_EQ(refusal({1, 3}, {}, {}), "cu_seqlens[0] must be 0, got 1");
  EXPECT_EQ(refusal({0, 5, 3}, {}, {}), "cu_seqlens[2] (3) must be at least cu_seqlens[1] (5)");
  EXPECT_EQ(refusal({0, 5}, {}, 4), "cu_seqlens[1] (5) must be at most num_tokens (4)");
  EXPECT_EQ(refusal({0, 3}, {0, 8}, 7), "cu_seqlens_padded[1] (8) must be at most num_tokens (7)");
  EXPECT_EQ(refusal({0, 3}, {0, 4, 8}, {}),
            "cu_seqlens_padded must have 2 entries like cu_seqlens, got 3");
  EXPECT_EQ(refusal({0, 3, 8}, {0, 4, 8}, {}),
            "sequence 1 has 5 tokens by cu_seqlens, but only 4 by cu_seqlens_padded, which must "
            "not be less");
  EXPECT_EQ(refusal({}, {}, {}),
            "cu_seqlens must be [N + 1] int32 or int64 for N sequences, got [0] int64");
}

// Rank r's part of each sequence, as attention over local tokens needs it.
TEST(PackedSequences, OfAShardAreTheLocalPartsOfAllSequences) {
  const SequenceLayout layout{
      .num_ranks = 2, .cut = SequenceCut::kZigzag, .packed = pack({4, 0, 5}, 8, 1)};
  const PackedSequences first = SequenceShard(layout, 0).local_sequences();
  EXPECT_THAT(first.starts(), ElementsAre(0, 4, 4, 8));
  EXPECT_THAT(first.lengths(), ElementsAre(2, 0, 2));  // chunks of 2: tokens 0, 1; none of 6, 7
  EXPECT_EQ(first.num_tokens(), 9);                    // the token after the last sequence
  const PackedSequences second = SequenceShard(layout, 1).local_sequences();
  EXPECT_THAT(second.lengths(), ElementsAre(2, 0, 3));
  EXPECT_EQ(second.num_tokens(), 8);
}

TEST(PackedSequences, OfAllShardsHaveAllTokens) {
  for_packed_layouts([](const SequenceLayout& layout) {
    const size_t N = layout.packed->lengths().size();
    std::vector<int64_t> lengths(N);
    for (int rank = 0; rank < layout.num_ranks; ++rank) {
      const SequenceShard shard(layout, rank);
      const PackedSequences local = shard.local_sequences();
      EXPECT_EQ(local.num_tokens(), shard.num_tokens()) << name_of(layout);
      for (size_t s = 0; s < N; ++s) lengths[s] += local.lengths()[s];
    }
    const auto wanted = layout.packed->lengths();
    EXPECT_EQ(lengths, std::vector<int64_t>(wanted.begin(), wanted.end())) << name_of(layout);
  });
}

}  // namespace
}  // namespace crossdock
