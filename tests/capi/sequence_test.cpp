// Sequence shards, packed sequences and balancing through the C API.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "capi/abi.hpp"
#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

using testing::ElementsAre;

/// A shard that is destroyed with this object.
class Shard {
 public:
  explicit Shard(const crossdock_sequence_layout& layout) {
    EXPECT_OK(crossdock_sequence_shard_create(&layout, &handle));
    EXPECT_OK(crossdock_sequence_shard_describe(handle, &info));
  }
  ~Shard() { crossdock_sequence_shard_destroy(handle); }
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  crossdock_sequence_shard* handle = nullptr;
  crossdock_sequence_shard_info info = made<crossdock_sequence_shard_info>();
};

crossdock_sequence_layout dense(int64_t batch, int64_t length, int32_t num_ranks, int32_t rank) {
  auto layout = made<crossdock_sequence_layout>();
  layout.batch = batch;
  layout.length = length;
  layout.num_ranks = num_ranks;
  layout.rank = rank;
  return layout;
}

TEST(CSequence, AShardHasIndicesRunsAndShapes) {
  const Shard shard(dense(2, 5, 2, 1));
  EXPECT_EQ(shard.info.num_tokens, 4);
  EXPECT_EQ(shard.info.num_global_tokens, 10);
  EXPECT_EQ(shard.info.num_sequences, 2);
  EXPECT_THAT(shard.info.shape, ElementsAre(2, 2));
  EXPECT_THAT(shard.info.global_shape, ElementsAre(2, 5));
  ASSERT_EQ(shard.info.num_runs, 2);
  std::array<crossdock_token_run, 2> runs{};
  EXPECT_OK(crossdock_sequence_shard_runs(shard.handle, runs.data()));
  EXPECT_EQ(runs[1].local, 2);
  EXPECT_EQ(runs[1].global, 8);
  EXPECT_EQ(runs[1].count, 2);
  int64_t index = -1;
  EXPECT_OK(crossdock_sequence_shard_global_index(shard.handle, 1, &index));
  EXPECT_EQ(index, 4);
  EXPECT_EQ(crossdock_sequence_shard_global_index(shard.handle, 4, &index),
            CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(index, 4);
}

TEST(CSequence, ShardsArePlacedAndGathered) {
  const std::vector<float> x = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const crossdock_tensor global = crossdock_tensor_2d(x.data(), CROSSDOCK_F32, 2, 5);
  std::vector<std::vector<float>> rows;
  std::vector<crossdock_tensor> locals;
  std::vector<float> placed(10, -1.0F);
  const crossdock_tensor target = crossdock_tensor_1d(placed.data(), CROSSDOCK_F32, 10);
  for (int32_t rank = 0; rank < 2; ++rank) {
    const Shard shard(dense(2, 5, 2, rank));
    rows.emplace_back(static_cast<size_t>(shard.info.num_tokens));
    locals.push_back(crossdock_tensor_1d(rows.back().data(), CROSSDOCK_F32, shard.info.num_tokens));
    EXPECT_OK(crossdock_shard_tokens(shard.handle, &global, &locals.back(), nullptr));
  }
  EXPECT_THAT(rows[1], ElementsAre(3, 4, 8, 9));
  const Shard second(dense(2, 5, 2, 1));
  EXPECT_OK(crossdock_place_tokens(second.handle, &locals[1], &target, nullptr));
  EXPECT_THAT(placed, ElementsAre(-1, -1, -1, 3, 4, -1, -1, -1, 8, 9));
  EXPECT_OK(crossdock_gather_shards(second.handle, locals.data(), &target, nullptr));
  EXPECT_EQ(placed, x);
  EXPECT_EQ(crossdock_shard_tokens(second.handle, &global, nullptr, nullptr),
            CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(crossdock_last_error()), "local must not be NULL");
}

TEST(CSequence, PackedTokensAreDescribed) {
  const std::vector<int32_t> offsets = {0, 3, 3, 5};
  const std::vector<int64_t> padded = {0, 4, 4, 8};
  auto layout = made<crossdock_sequence_layout>();
  layout.cut = CROSSDOCK_CUT_ZIGZAG;
  layout.cu_seqlens = crossdock_tensor_1d(offsets.data(), CROSSDOCK_I32, 4);
  layout.cu_seqlens_padded = crossdock_tensor_1d(padded.data(), CROSSDOCK_I64, 4);
  layout.num_tokens = 9;
  layout.num_ranks = 2;
  const Shard shard(layout);  // tokens 0, 3, 4, 7, and 8 after the last sequence
  EXPECT_EQ(shard.info.num_tokens, 5);
  EXPECT_EQ(shard.info.num_sequences, 3);
  EXPECT_THAT(shard.info.shape, ElementsAre(5, 0));
  std::array<int32_t, 5> ids{};
  std::array<int64_t, 5> positions{};
  std::array<bool, 5> mask{};
  const crossdock_tensor id_tensor = crossdock_tensor_1d(ids.data(), CROSSDOCK_I32, 5);
  const crossdock_tensor position_tensor = crossdock_tensor_1d(positions.data(), CROSSDOCK_I64, 5);
  const crossdock_tensor mask_tensor = crossdock_tensor_1d(mask.data(), CROSSDOCK_BOOL, 5);
  EXPECT_OK(crossdock_describe_tokens(shard.handle, &id_tensor, &position_tensor, &mask_tensor));
  EXPECT_THAT(ids, ElementsAre(0, 0, 2, 2, 2));
  EXPECT_THAT(positions, ElementsAre(0, 3, 0, 3, 0));
  EXPECT_THAT(mask, ElementsAre(false, true, false, true, true));
  EXPECT_EQ(crossdock_describe_tokens(shard.handle, &position_tensor, nullptr, nullptr),
            CROSSDOCK_INVALID_ARGUMENT);

  layout.cu_seqlens = {};
  crossdock_sequence_shard* none = nullptr;
  EXPECT_EQ(crossdock_sequence_shard_create(&layout, &none), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
}

TEST(CSequence, TokensAreGatheredOverAGroup) {
  run_c_ranks(3, [](crossdock_group* group, int rank) {
    const Shard shard(dense(2, 4, 3, rank));
    std::vector<float> rows;
    for (int64_t i = 0; i < shard.info.num_tokens; ++i) {
      int64_t index = 0;
      EXPECT_OK(crossdock_sequence_shard_global_index(shard.handle, i, &index));
      rows.push_back(static_cast<float>(index));
    }
    const crossdock_tensor local =
        crossdock_tensor_1d(rows.data(), CROSSDOCK_F32, shard.info.num_tokens);
    crossdock_output global = {};
    EXPECT_OK(crossdock_gather_tokens(group, shard.handle, &local, &global));
    EXPECT_THAT(doubles(global.tensor), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
    EXPECT_OK(crossdock_output_release(&global, nullptr));

    // A mistake that only C allows is refused on every rank.
    EXPECT_EQ(crossdock_gather_tokens(group, shard.handle, rank == 1 ? nullptr : &local, &global),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_NE(std::string(crossdock_last_error()).find("local must not be NULL"),
              std::string::npos);
    EXPECT_OK(crossdock_gather_tokens(group, shard.handle, &local, &global));
    EXPECT_OK(crossdock_output_release(&global, nullptr));
  });
}

TEST(CSequence, TokensArePaddedAndTrimmed) {
  std::vector<float> x = {1, 2, 3};
  std::vector<float> padded(4, -1.0F);
  const crossdock_tensor own = crossdock_tensor_1d(x.data(), CROSSDOCK_F32, 3);
  const crossdock_tensor all = crossdock_tensor_1d(padded.data(), CROSSDOCK_F32, 4);
  EXPECT_OK(crossdock_pad_tokens(&own, &all, nullptr));
  EXPECT_THAT(padded, ElementsAre(1, 2, 3, 0));
  x.assign(3, 0.0F);
  EXPECT_OK(crossdock_trim_tokens(&all, &own, nullptr));
  EXPECT_THAT(x, ElementsAre(1, 2, 3));
  std::array<bool, 4> mask{};
  const crossdock_tensor mask_tensor = crossdock_tensor_1d(mask.data(), CROSSDOCK_BOOL, 4);
  EXPECT_OK(crossdock_pad_mask(3, nullptr, &mask_tensor, nullptr));
  EXPECT_THAT(mask, ElementsAre(false, false, false, true));
}

TEST(CSequence, SequencesAreBalanced) {
  const std::vector<int64_t> lengths = {4, 1, 1, 2};
  auto args = made<crossdock_balance_args>();
  args.lengths = lengths.data();
  args.num_sequences = 4;
  args.num_ranks = 2;
  std::array<int32_t, 4> ranks{};
  double imbalance = 0.0;
  EXPECT_OK(crossdock_balance_sequences(&args, ranks.data(), &imbalance));
  EXPECT_THAT(ranks, ElementsAre(0, 1, 1, 1));
  EXPECT_EQ(imbalance, 1.0);
  args.cost_per_token_pair = 1.0;
  args.policy = CROSSDOCK_KEEP_ORDER;
  EXPECT_OK(crossdock_balance_sequences(&args, ranks.data(), &imbalance));
  EXPECT_EQ(imbalance, 16.0 / 11.0);
  args.policy = 2;
  EXPECT_EQ(crossdock_balance_sequences(&args, ranks.data(), nullptr), CROSSDOCK_INVALID_ARGUMENT);
}

TEST(CApi, SizesOfSequencesThatCannotBeAreRefused) {
  const int64_t lengths[2] = {int64_t{1} << 62, int64_t{1} << 62};
  auto args = made<crossdock_balance_args>();
  args.lengths = lengths;
  args.num_sequences = 2;
  int32_t ranks[2] = {};
  EXPECT_EQ(crossdock_balance_sequences(&args, ranks, nullptr), CROSSDOCK_INVALID_ARGUMENT);
  args.num_sequences = 0;
  args.num_ranks = 100'000'000;
  EXPECT_EQ(crossdock_balance_sequences(&args, ranks, nullptr), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_STREQ(crossdock_last_error(), "num_ranks must be in [1, 65536], got 100000000");
  auto layout = made<crossdock_sequence_layout>();
  layout.batch = 0x7fffffff;
  layout.length = 4;
  layout.num_ranks = 2;
  crossdock_sequence_shard* shard = nullptr;
  EXPECT_EQ(crossdock_sequence_shard_create(&layout, &shard), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(shard, nullptr);
}

TEST(CAbi, SequenceLayout) {
  EXPECT_SIZE(crossdock_sequence_layout, 160);
  EXPECT_FIELD(crossdock_sequence_layout, struct_size, 0);
  EXPECT_FIELD(crossdock_sequence_layout, batch, 8);
  EXPECT_FIELD(crossdock_sequence_layout, length, 16);
  EXPECT_FIELD(crossdock_sequence_layout, num_ranks, 24);
  EXPECT_FIELD(crossdock_sequence_layout, rank, 28);
  EXPECT_FIELD(crossdock_sequence_layout, order, 32);
  EXPECT_FIELD(crossdock_sequence_layout, cut, 36);
  EXPECT_FIELD(crossdock_sequence_layout, cu_seqlens, 40);
  EXPECT_FIELD(crossdock_sequence_layout, cu_seqlens_padded, 96);
  EXPECT_FIELD(crossdock_sequence_layout, num_tokens, 152);
}

TEST(CAbi, SequenceShardInfo) {
  EXPECT_SIZE(crossdock_sequence_shard_info, 72);
  EXPECT_FIELD(crossdock_sequence_shard_info, struct_size, 0);
  EXPECT_FIELD(crossdock_sequence_shard_info, num_tokens, 8);
  EXPECT_FIELD(crossdock_sequence_shard_info, num_global_tokens, 16);
  EXPECT_FIELD(crossdock_sequence_shard_info, num_sequences, 24);
  EXPECT_FIELD(crossdock_sequence_shard_info, num_runs, 32);
  EXPECT_FIELD(crossdock_sequence_shard_info, shape, 40);
  EXPECT_FIELD(crossdock_sequence_shard_info, global_shape, 56);
}

TEST(CAbi, TokenRun) {
  EXPECT_SIZE(crossdock_token_run, 24);
  EXPECT_FIELD(crossdock_token_run, local, 0);
  EXPECT_FIELD(crossdock_token_run, global, 8);
  EXPECT_FIELD(crossdock_token_run, count, 16);
}

TEST(CAbi, BalanceArgs) {
  EXPECT_SIZE(crossdock_balance_args, 48);
  EXPECT_FIELD(crossdock_balance_args, struct_size, 0);
  EXPECT_FIELD(crossdock_balance_args, lengths, 8);
  EXPECT_FIELD(crossdock_balance_args, num_sequences, 16);
  EXPECT_FIELD(crossdock_balance_args, num_ranks, 24);
  EXPECT_FIELD(crossdock_balance_args, policy, 28);
  EXPECT_FIELD(crossdock_balance_args, cost_per_token, 32);
  EXPECT_FIELD(crossdock_balance_args, cost_per_token_pair, 40);
}

TEST(CAbi, ConstantsOfSequences) {
  EXPECT_EQ(CROSSDOCK_BATCH_FIRST, 0);
  EXPECT_EQ(CROSSDOCK_SEQUENCE_FIRST, 1);
  EXPECT_EQ(CROSSDOCK_CUT_CONTIGUOUS, 0);
  EXPECT_EQ(CROSSDOCK_CUT_ZIGZAG, 1);
  EXPECT_EQ(CROSSDOCK_LONGEST_FIRST, 0);
  EXPECT_EQ(CROSSDOCK_KEEP_ORDER, 1);
}

}  // namespace
}  // namespace crossdock::capi_test
