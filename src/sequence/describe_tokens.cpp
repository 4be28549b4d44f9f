#include <algorithm>
#include <limits>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/sequence.hpp"

namespace crossdock {
namespace {

struct TokenPlace {
  int64_t sequence = 0;
  int64_t position = 0;
  bool is_padding = false;
};

// Tokens of [B, L] or [L, B].
class DensePlaces {
 public:
  explicit DensePlaces(const SequenceLayout& layout) : layout_(layout) {}

  TokenPlace find(int64_t token) const {
    if (layout_.order == TokenOrder::kBatchFirst) {
      return {token / layout_.length, token % layout_.length};
    }
    return {token % layout_.batch, token / layout_.batch};
  }

 private:
  const SequenceLayout& layout_;
};

// Packed tokens, which must be requested in ascending order.
class PackedPlaces {
 public:
  explicit PackedPlaces(const PackedSequences& packed) : packed_(packed) {}

  TokenPlace find(int64_t token) {
    const auto starts = packed_.starts();
    const auto N = static_cast<size_t>(packed_.num_sequences());
    while (sequence_ < N && token >= starts[sequence_ + 1]) ++sequence_;
    const int64_t position = token - starts[sequence_];
    if (sequence_ < N) {
      const bool is_padding = position >= packed_.lengths()[sequence_];
      return {static_cast<int64_t>(sequence_), position, is_padding};
    }
    // After the last sequence, any valid number will do.
    return {std::max<int64_t>(packed_.num_sequences() - 1, 0), position, true};
  }

 private:
  const PackedSequences& packed_;
  size_t sequence_ = 0;  // of the last token; N after the last sequence
};

template <typename Places>
void fill(const SequenceShard& shard, Places places, TokenDescription& tokens) {
  int32_t* sequence_id = tokens.sequence_ids.view.as<int32_t>().data();
  int64_t* position = tokens.positions.view.as<int64_t>().data();
  bool* mask = tokens.mask.view.as<bool>().data();
  for (const TokenRun& run : shard.runs()) {
    for (int64_t token = run.global; token < run.global + run.count; ++token) {
      const TokenPlace place = places.find(token);
      *sequence_id++ = static_cast<int32_t>(place.sequence);
      *position++ = place.position;
      *mask++ = place.is_padding;
    }
  }
}

}  // namespace

TokenDescription describe_tokens(const SequenceShard& shard) {
  const SequenceLayout& layout = shard.layout();
  const int64_t T = shard.num_tokens();
  const int64_t N = layout.packed ? layout.packed->num_sequences() : layout.batch;
  CROSSDOCK_CHECK(N <= std::numeric_limits<int32_t>::max(),
                  "sequences are numbered in int32: batch must be at most 2^31 - 1, got ", N);
  TokenDescription tokens{.sequence_ids = new_host_tensor(DType::kI32, {T}),
                          .positions = new_host_tensor(DType::kI64, {T}),
                          .mask = new_host_tensor(DType::kBool, {T}),
                          .num_sequences = std::max<int64_t>(N, 1)};
  if (layout.packed) {
    fill(shard, PackedPlaces(*layout.packed), tokens);
  } else {
    fill(shard, DensePlaces(layout), tokens);
  }
  return tokens;
}

}  // namespace crossdock
