#include "tokens.hpp"

#include <algorithm>

#include "crossdock/sequence.hpp"

namespace train {
namespace {

using crossdock::SequenceCut;
using crossdock::SequenceLayout;
using crossdock::SequenceShard;
using crossdock::TokenOrder;

int64_t length_of(const std::string& sequence) {
  return std::ssize(sequence);
}

// The sequences of one data-parallel rank, balanced by length.
std::vector<std::string> take_sequences(const std::vector<std::string>& batch, int dp, int rank) {
  std::vector<int64_t> lengths;
  lengths.reserve(batch.size());
  for (const std::string& sequence : batch) lengths.push_back(length_of(sequence));
  const crossdock::SequenceBalance balance =
      crossdock::balance_sequences({.lengths = lengths, .num_ranks = dp});
  std::vector<std::string> mine;
  for (const int64_t s : balance.of_rank(rank)) mine.push_back(batch[s]);
  return mine;
}

SequenceLayout pack(const std::vector<std::string>& sequences, int64_t alignment) {
  std::vector<int64_t> cu_seqlens = {0};
  std::vector<int64_t> cu_seqlens_padded = {0};
  for (const std::string& sequence : sequences) {
    const int64_t length = length_of(sequence);
    cu_seqlens.push_back(cu_seqlens.back() + length);
    cu_seqlens_padded.push_back(cu_seqlens_padded.back() +
                                crossdock::align_num_tokens(length, alignment));
  }
  const int64_t size = std::ssize(cu_seqlens);
  return {.packed = crossdock::PackedSequences(
              {.cu_seqlens = {cu_seqlens.data(), {size}},
               .cu_seqlens_padded = {cu_seqlens_padded.data(), {size}}})};
}

// On one rank, not yet cut.
SequenceLayout lay_out(const std::vector<std::string>& sequences, const TokenOptions& options) {
  if (options.layout == Layout::kPacked) return pack(sequences, options.alignment);
  int64_t longest = 0;
  for (const std::string& sequence : sequences) longest = std::max(longest, length_of(sequence));
  return {.batch = std::max<int64_t>(1, std::ssize(sequences)),
          .length = crossdock::align_num_tokens(longest, options.alignment),
          .order = options.layout == Layout::kBatchFirst ? TokenOrder::kBatchFirst
                                                         : TokenOrder::kSequenceFirst};
}

// All tokens of the sequences. A target is found before the cut: afterwards the byte that follows
// may be on another rank.
Tokens make_tokens(const std::vector<std::string>& sequences, const SequenceLayout& layout) {
  const crossdock::TokenDescription all = crossdock::describe_tokens(SequenceShard(layout, 0));
  Tokens tokens;
  tokens.num_sequences = std::ssize(sequences);
  const auto ids = all.sequence_ids.view.as<int32_t>();
  const auto positions = all.positions.view.as<int64_t>();
  tokens.sequence_ids.assign(ids.begin(), ids.end());
  tokens.positions.assign(positions.begin(), positions.end());
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::string& text = sequences[ids[i]];
    const auto position = static_cast<size_t>(positions[i]);
    tokens.is_padding.push_back(position < text.size() ? 0 : 1);
    tokens.bytes.push_back(position < text.size() ? text[position] : 0);
    tokens.targets.push_back(position + 1 < text.size() ? text[position + 1] : -1);
  }
  return tokens;
}

template <typename Value>
std::vector<Value> cut(const std::vector<Value>& all, const SequenceShard& shard) {
  std::vector<Value> mine(static_cast<size_t>(shard.num_tokens()));
  crossdock::shard_tokens(shard, {all.data(), {shard.num_global_tokens()}},
                          {mine.data(), {shard.num_tokens()}});
  return mine;
}

Tokens cut(const Tokens& all, const SequenceShard& shard, Mistake mistake) {
  Tokens mine{.bytes = cut(all.bytes, shard),
              .targets = cut(all.targets, shard),
              .positions = cut(all.positions, shard),
              .sequence_ids = cut(all.sequence_ids, shard),
              .is_padding = cut(all.is_padding, shard),
              .num_sequences = all.num_sequences};
  if (mistake == Mistake::kNaivePlacement) {
    for (int64_t i = 0; i < mine.size(); ++i) {
      const int64_t naive = std::min(shard.rank() * mine.size() + i, all.size() - 1);
      mine.targets[i] = all.targets[naive];
    }
  }
  return mine;
}

// The layout of a context-parallel rank's tokens, cut among the tensor-parallel ranks.
SequenceLayout cut_among_tp(const SequenceShard& of_cp, int tp) {
  const SequenceLayout& layout = of_cp.layout();
  if (layout.packed) return {.length = of_cp.num_tokens(), .num_ranks = tp};
  const int length_dimension = layout.order == TokenOrder::kBatchFirst ? 1 : 0;
  return {.batch = layout.batch,
          .length = of_cp.shape()[length_dimension],
          .num_ranks = tp,
          .order = layout.order};
}

}  // namespace

Tokens take_share(const crossdock::Mesh& mesh, const std::vector<std::string>& batch,
                  const TokenOptions& options, Mistake mistake) {
  const crossdock::MeshShape& shape = mesh.shape();
  const crossdock::MeshCoordinates& at = mesh.coordinates();
  const std::vector<std::string> sequences =
      take_sequences(batch, static_cast<int>(shape.dp), at.dp);
  SequenceLayout layout = lay_out(sequences, options);
  const Tokens all = make_tokens(sequences, layout);

  layout.num_ranks = static_cast<int>(shape.cp);
  layout.cut = SequenceCut::kZigzag;
  const SequenceShard of_cp(layout, at.cp);
  Tokens mine = cut(all, of_cp, mistake);
  if (options.replicated) return mine;
  const SequenceShard of_tp(cut_among_tp(of_cp, static_cast<int>(shape.tp)), at.tp);
  return cut(mine, of_tp, mistake);
}

}  // namespace train
