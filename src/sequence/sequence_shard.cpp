#include <algorithm>
#include <array>
#include <iterator>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/sequence.hpp"

namespace crossdock {
namespace {

// In batch-first order, every sequence that is cut has runs of its own.
constexpr int64_t kMaxCutSequences = int64_t{1} << 24;

// Positions [start, start + count) of a sequence.
struct Chunk {
  int64_t start = 0;
  int64_t count = 0;
};

// Chunk `index` of a sequence that is cut into num_chunks.
Chunk cut(int64_t length, int64_t num_chunks, int64_t index) {
  const int64_t size = (length + num_chunks - 1) / num_chunks;
  const int64_t start = std::min(index * size, length);
  return {start, std::min(size, length - start)};
}

// The one or two chunks of a sequence that a rank holds.
std::array<Chunk, 2> chunks_of(const SequenceLayout& layout, int rank, int64_t length) {
  const int64_t n = layout.num_ranks;
  if (layout.cut == SequenceCut::kContiguous) return {cut(length, n, rank), Chunk{}};
  return {cut(length, 2 * n, rank), cut(length, 2 * n, 2 * n - 1 - rank)};
}

void check_layout(const SequenceLayout& layout, int rank) {
  CROSSDOCK_CHECK(layout.num_ranks >= 1, "num_ranks must be at least 1, got ", layout.num_ranks);
  CROSSDOCK_CHECK(rank >= 0 && rank < layout.num_ranks, "rank must be in [0, ", layout.num_ranks,
                  "), got ", rank);
  CROSSDOCK_CHECK(layout.batch >= 0 && layout.length >= 0,
                  "batch and length must not be negative, got ", layout.batch, " and ",
                  layout.length);
  CROSSDOCK_CHECK(layout.batch <= kMaxBytes && layout.length <= kMaxBytes,
                  "batch and length must be at most 2^60, got ", layout.batch, " and ",
                  layout.length);
  CROSSDOCK_CHECK(product_within(kMaxBytes, {layout.batch, layout.length}), "batch (", layout.batch,
                  ") times length (", layout.length, ") must be at most 2^60");
  CROSSDOCK_CHECK(layout.num_ranks == 1 || layout.order == TokenOrder::kSequenceFirst ||
                      layout.batch <= kMaxCutSequences,
                  "batch must be at most ", kMaxCutSequences,
                  " for sequences that are cut among ranks, got ", layout.batch,
                  "; use TokenOrder::kSequenceFirst or shards of fewer sequences");
  CROSSDOCK_CHECK(!layout.packed || (layout.batch == 1 && layout.length == 0),
                  "batch and length must keep their defaults, 1 and 0, with packed sequences, got ",
                  layout.batch, " and ", layout.length);
}

ConstTensorView view_of(const std::vector<int64_t>& values) {
  return {values.data(), Shape{std::ssize(values)}};
}

}  // namespace

SequenceShard::SequenceShard(SequenceLayout layout, int rank)
    : layout_(std::move(layout)), rank_(rank) {
  check_layout(layout_, rank_);
  if (layout_.packed) {
    const auto starts = layout_.packed->starts();
    for (size_t s = 0; s + 1 < starts.size(); ++s) {
      append_runs(starts[s], starts[s + 1] - starts[s], 1);
    }
    append_runs(starts.back(), layout_.packed->num_tokens() - starts.back(), 1);
    return;
  }
  for (const Chunk& chunk : chunks_of(layout_, rank_, layout_.length)) {
    local_length_ += chunk.count;
  }
  if (local_length_ == 0) return;
  // In both cases the tokens at the positions of a chunk are contiguous.
  if (layout_.order == TokenOrder::kSequenceFirst || layout_.num_ranks == 1) {
    append_runs(0, layout_.length, layout_.batch);
    return;
  }
  for (int64_t b = 0; b < layout_.batch; ++b) append_runs(b * layout_.length, layout_.length, 1);
}

// The runs of a sequence that begins at token `start` and has `width` tokens at each position.
void SequenceShard::append_runs(int64_t start, int64_t length, int64_t width) {
  for (const Chunk& chunk : chunks_of(layout_, rank_, length)) {
    const TokenRun run{num_tokens_, start + chunk.start * width, chunk.count * width};
    if (run.count == 0) continue;
    num_tokens_ += run.count;
    if (!runs_.empty() && runs_.back().global + runs_.back().count == run.global) {
      runs_.back().count += run.count;
    } else {
      runs_.push_back(run);
    }
  }
}

int64_t SequenceShard::num_global_tokens() const {
  return layout_.packed ? layout_.packed->num_tokens() : layout_.batch * layout_.length;
}

Shape SequenceShard::shape() const {
  if (layout_.packed) return {num_tokens_};
  const bool batch_first = layout_.order == TokenOrder::kBatchFirst;
  return batch_first ? Shape{layout_.batch, local_length_} : Shape{local_length_, layout_.batch};
}

Shape SequenceShard::global_shape() const {
  if (layout_.packed) return {layout_.packed->num_tokens()};
  const bool batch_first = layout_.order == TokenOrder::kBatchFirst;
  return batch_first ? Shape{layout_.batch, layout_.length} : Shape{layout_.length, layout_.batch};
}

int64_t SequenceShard::global_index(int64_t i) const {
  CROSSDOCK_CHECK(i >= 0 && i < num_tokens_, "a local token of this shard must be in [0, ",
                  num_tokens_, "), got ", i);
  const auto next = std::ranges::upper_bound(runs_, i, {}, &TokenRun::local);
  const TokenRun& run = *std::prev(next);
  return run.global + (i - run.local);
}

PackedSequences SequenceShard::local_sequences() const {
  CROSSDOCK_CHECK(layout_.packed, "local_sequences is for packed sequences; this layout is ",
                  global_shape().to_string());
  const auto starts = layout_.packed->starts();
  const auto lengths = layout_.packed->lengths();
  std::vector<int64_t> real{0};
  std::vector<int64_t> padded{0};
  for (size_t s = 0; s < lengths.size(); ++s) {
    real.push_back(real.back());
    padded.push_back(padded.back());
    for (const Chunk& chunk : chunks_of(layout_, rank_, starts[s + 1] - starts[s])) {
      real.back() += std::clamp<int64_t>(lengths[s] - chunk.start, 0, chunk.count);
      padded.back() += chunk.count;
    }
  }
  return PackedSequences(PackedSequencesArgs{.cu_seqlens = view_of(real),
                                             .cu_seqlens_padded = view_of(padded),
                                             .num_tokens = num_tokens_});
}

}  // namespace crossdock
