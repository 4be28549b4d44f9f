// The layer on shards of packed and of dense sequences: the same bits as on one rank.
#include <gtest/gtest.h>

#include <mutex>

#include "layer/layer_on_rank.hpp"
#include "sequence/layouts.hpp"

namespace crossdock {
namespace {

LayerCase make_layer_case(int64_t num_tokens, int64_t shared_inner) {
  MoeLayerConfig config;
  config.router.num_experts = 6;
  config.router.top_k = 2;
  config.router.width = 8;
  config.router.aux_loss_coeff = 0.7;
  config.router.aux_loss_scope = BalanceScope::kSequence;
  config.router.z_loss_coeff = 0.3;
  config.experts.inner = 5;
  config.experts.dtype = DType::kF32;
  config.shared_inner = shared_inner;
  return make_case({.config = config, .tokens_per_rank = {num_tokens}, .biases = true});
}

OwnedTensor filled(DType dtype, const Shape& shape, double value) {
  return reference::to_tensor(
      dtype, shape, std::vector<double>(static_cast<size_t>(shape.num_elements()), value));
}

struct GlobalResult {
  std::vector<double> out;     // [T, D]
  std::vector<double> grad_x;  // [T, D]
  double aux = 0.0;
};

/// This rank's tokens, padded to a multiple of `alignment`.
struct PaddedTokens {
  OwnedTensor x, grad_out, sequence_ids, mask;
  int64_t num_sequences = 1;
};

PaddedTokens pad(const LayerOnRank& rank, const SequenceShard& shard, int64_t alignment) {
  const int64_t T = shard.num_tokens();
  const int64_t num_padded = align_num_tokens(T, alignment);
  const int64_t D = rank.layer_case.config.router.width;
  const TokenDescription tokens = describe_tokens(shard);
  PaddedTokens padded{.x = filled(DType::kF32, {num_padded, D}, -1.0),
                      .grad_out = filled(DType::kF32, {num_padded, D}, -1.0),
                      .sequence_ids = filled(DType::kI32, {num_padded}, -1.0),
                      .mask = filled(DType::kBool, {num_padded}, 0.0),
                      .num_sequences = tokens.num_sequences};
  const OwnedTensor local = filled(DType::kF32, {T, D}, -1.0);
  shard_tokens(shard, rank.tokens.x.view, local.view);
  pad_tokens(local.view, padded.x.view);
  shard_tokens(shard, rank.tokens.grad_out.view, local.view);
  pad_tokens(local.view, padded.grad_out.view);
  pad_tokens(tokens.sequence_ids.view, padded.sequence_ids.view);
  pad_mask(T, tokens.mask.view, padded.mask.view);
  return padded;
}

/// Expects that rows after the first T are exactly zero; gathers the others.
std::vector<double> gather_trimmed(Group& group, const SequenceShard& shard,
                                   const TensorView& padded) {
  const int64_t D = padded.shape[1];
  const OwnedTensor local = filled(DType::kF32, {shard.num_tokens(), D}, -1.0);
  trim_tokens(padded, local.view);
  const OwnedTensor global = gather_tokens(group, shard, local.view);
  return reference::to_values(global.view);
}

void expect_zero_padding(const std::vector<double>& rows, int64_t num_tokens, int64_t D) {
  for (size_t i = static_cast<size_t>(num_tokens * D); i < rows.size(); ++i) {
    EXPECT_EQ(rows[i], 0.0) << "value " << i;
  }
}

GlobalResult run_on_shards(const LayerCase& layer_case, const SequenceLayout& layout,
                           int64_t alignment) {
  GlobalResult result;
  std::mutex mutex;
  run_ranks(layout.num_ranks, [&](Group& group) {
    // Every rank knows all tokens and uses those of its shard.
    LayerOnRank rank(group, layer_case, {.counting_group = &group}, 0.0, 0);
    const SequenceShard shard(layout, group.rank());
    const PaddedTokens tokens = pad(rank, shard, alignment);
    MoeForwardArgs args = rank.forward_args();
    args.x = tokens.x.view;
    args.mask = tokens.mask.view;
    args.sequence_ids = tokens.sequence_ids.view;
    args.num_sequences = tokens.num_sequences;
    MoeForwardResult forward = rank.layer.forward(args);
    MoeBackwardArgs backward = rank.backward_args(forward.saved);
    backward.x = tokens.x.view;
    backward.grad_out = tokens.grad_out.view;
    const double aux = forward.saved.decision.losses.aux;
    const OwnedTensor grad_x = rank.layer.backward(backward);
    expect_zero_padding(reference::to_values(grad_x.view), shard.num_tokens(),
                        grad_x.view.shape[1]);

    std::vector<double> out = gather_trimmed(group, shard, forward.out.view);
    std::vector<double> all_grad_x = gather_trimmed(group, shard, grad_x.view);
    const std::lock_guard lock(mutex);
    result.aux += aux;
    if (group.rank() != 0) return;
    result.out = std::move(out);
    result.grad_x = std::move(all_grad_x);
  });
  return result;
}

SequenceLayout on_one_rank(SequenceLayout layout) {
  layout.num_ranks = 1;
  return layout;
}

void expect_same_bits(const LayerCase& layer_case, const SequenceLayout& layout) {
  const GlobalResult whole = run_on_shards(layer_case, on_one_rank(layout), 1);
  for (const int64_t alignment : {1, 8}) {
    const GlobalResult sharded = run_on_shards(layer_case, layout, alignment);
    EXPECT_EQ(sharded.out, whole.out) << name_of(layout) << " alignment " << alignment;
    EXPECT_EQ(sharded.grad_x, whole.grad_x) << name_of(layout) << " alignment " << alignment;
    EXPECT_NEAR(sharded.aux, whole.aux, 1e-6) << name_of(layout);
  }
}

TEST(LayerOnShards, OfPackedSequencesHasTheBitsOfOneRank) {
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t alignment : {1, 2 * ranks}) {
      const SequenceLayout layout{.num_ranks = ranks,
                                  .cut = SequenceCut::kZigzag,
                                  .packed = pack({11, 0, 4, 1, 7}, alignment, 3)};
      expect_same_bits(make_layer_case(layout.packed->num_tokens(), 0), layout);
    }
  }
}

TEST(LayerOnShards, OfABatchHasTheBitsOfOneRank) {
  for (const int ranks : {2, 4}) {
    for (const SequenceLayout& layout : list_dense_layouts(3, 5, ranks)) {
      expect_same_bits(make_layer_case(15, 4), layout);
    }
  }
}

// Padding between sequences has no gradient either.
TEST(LayerOnShards, PaddingHasExactlyNoGradient) {
  const SequenceLayout layout{
      .num_ranks = 2, .cut = SequenceCut::kZigzag, .packed = pack({5, 2, 9}, 4, 6)};
  const LayerCase layer_case = make_layer_case(layout.packed->num_tokens(), 0);
  const GlobalResult result = run_on_shards(layer_case, layout, 16);
  const TokenDescription all = describe_tokens(SequenceShard(on_one_rank(layout), 0));
  const auto mask = all.mask.view.as<bool>();
  const auto D = static_cast<size_t>(layer_case.config.router.width);
  int64_t num_padding = 0;
  for (size_t t = 0; t < mask.size(); ++t) {
    if (!mask[t]) continue;
    ++num_padding;
    for (size_t d = 0; d < D; ++d) {
      EXPECT_EQ(result.grad_x[t * D + d], 0.0) << "token " << t;
      EXPECT_EQ(result.out[t * D + d], 0.0) << "token " << t;
    }
  }
  EXPECT_EQ(num_padding, 3 + 2 + 3 + 6);
}

/// A tensor of tokens [T, ...] as [B, L, ...].
TensorView in_batch(const TensorView& tokens, const Shape& dims) {
  const Shape shape = tokens.shape.rank() == 1 ? dims : Shape{dims[0], dims[1], tokens.shape[1]};
  return {tokens.data, tokens.dtype, shape};
}

TEST(LayerOnShards, TakesABatchAndReturnsItsShape) {
  const SequenceLayout layout{.batch = 3, .length = 5, .num_ranks = 4};
  const LayerCase layer_case = make_layer_case(15, 4);
  run_ranks(layout.num_ranks, [&](Group& group) {
    LayerOnRank rank(group, layer_case, {.counting_group = &group}, 0.0, 0);
    const SequenceShard shard(layout, group.rank());  // the last one is empty
    const Shape dims = shard.shape();
    const PaddedTokens tokens = pad(rank, shard, 1);
    std::vector<std::vector<double>> out;
    std::vector<std::vector<double>> grad_x;
    for (const bool is_batch : {false, true}) {
      const auto view = [&](const TensorView& flat) {
        return is_batch ? in_batch(flat, dims) : flat;
      };
      MoeForwardArgs args = rank.forward_args();
      args.x = view(tokens.x.view);
      args.mask = view(tokens.mask.view);
      args.sequence_ids = view(tokens.sequence_ids.view);
      args.num_sequences = tokens.num_sequences;
      MoeForwardResult forward = rank.layer.forward(args);
      EXPECT_EQ(forward.out.view.shape, args.x.shape);
      out.push_back(reference::to_values(forward.out.view));
      MoeBackwardArgs backward = rank.backward_args(forward.saved);
      const OwnedTensor given = filled(DType::kF32, args.x.shape, -1.0);
      backward.x = args.x;
      backward.grad_out = view(tokens.grad_out.view);
      backward.grad_x = given.view;
      const OwnedTensor gradient = rank.layer.backward(backward);
      EXPECT_EQ(gradient.view.shape, args.x.shape);
      EXPECT_EQ(gradient.view.data, given.view.data);
      grad_x.push_back(reference::to_values(gradient.view));
    }
    EXPECT_EQ(out[1], out[0]);
    EXPECT_EQ(grad_x[1], grad_x[0]);
  });
}

TEST(LayerOnShards, ABatchOfTheWrongShapeIsRefusedOnEveryRank) {
  const LayerCase layer_case = spread(make_layer_case(12, 0), {6, 6});
  run_ranks(2, [&](Group& group) {
    LayerOnRank rank(group, layer_case);
    MoeForwardArgs args = rank.forward_args();
    args.x = in_batch(rank.tokens.x.view, {2, 3});
    const std::vector<uint8_t> memory(6);
    if (group.rank() == 1) args.mask = {memory.data(), DType::kBool, {3, 2}};
    expect_refused(group, "[3, 2] bool", [&] { static_cast<void>(rank.layer.forward(args)); });
  });
}

// The comparison above fails with the naive placement of tokens.
TEST(LayerOnShards, TheNaivePlacementHasOtherBits) {
  const SequenceLayout layout{.batch = 3, .length = 4, .num_ranks = 2};
  const LayerCase layer_case = make_layer_case(12, 0);
  const GlobalResult whole = run_on_shards(layer_case, on_one_rank(layout), 1);
  std::vector<double> naive(whole.out.size());
  const auto D = static_cast<int64_t>(layer_case.config.router.width);
  for (int rank = 0; rank < 2; ++rank) {
    const SequenceShard shard(layout, rank);
    for (int64_t i = 0; i < shard.num_tokens(); ++i) {
      const auto row = whole.out.begin() + shard.global_index(i) * D;
      std::copy(row, row + D, naive.begin() + (i + rank * shard.num_tokens()) * D);
    }
  }
  EXPECT_NE(naive, whole.out);
  EXPECT_EQ(run_on_shards(layer_case, layout, 1).out, whole.out);
}

}  // namespace
}  // namespace crossdock
