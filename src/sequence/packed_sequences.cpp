#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
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

namespace {

// [N + 1]
std::vector<int64_t> read_offsets(std::string_view name, const ConstTensorView& tensor) {
  const bool is_i32 = tensor.dtype == DType::kI32;
  CROSSDOCK_CHECK(
      tensor.shape.rank() == 1 && tensor.shape[0] >= 1 && (is_i32 || tensor.dtype == DType::kI64),
      name, " must be [N + 1] int32 or int64 for N sequences, got ", describe(tensor));
  check_memory(name, tensor);
  std::vector<int64_t> offsets;
  if (is_i32) {
    const auto values = tensor.as<int32_t>();
    offsets.assign(values.begin(), values.end());
  } else {
    const auto values = tensor.as<int64_t>();
    offsets.assign(values.begin(), values.end());
  }
  CROSSDOCK_CHECK(offsets[0] == 0, name, "[0] must be 0, got ", offsets[0]);
  for (size_t i = 1; i < offsets.size(); ++i) {
    CROSSDOCK_CHECK(offsets[i] >= offsets[i - 1], name, "[", i, "] (", offsets[i],
                    ") must be at least ", name, "[", i - 1, "] (", offsets[i - 1], ")");
  }
  return offsets;
}

}  // namespace

PackedSequences::PackedSequences(const PackedSequencesArgs& args) {
  const std::vector<int64_t> offsets = read_offsets("cu_seqlens", args.cu_seqlens);
  const bool is_padded = args.cu_seqlens_padded.given();
  starts_ = is_padded ? read_offsets("cu_seqlens_padded", args.cu_seqlens_padded) : offsets;
  CROSSDOCK_CHECK(starts_.size() == offsets.size(), "cu_seqlens_padded must have ", offsets.size(),
                  " entries like cu_seqlens, got ", starts_.size());
  const size_t N = offsets.size() - 1;
  CROSSDOCK_CHECK(N <= std::numeric_limits<int32_t>::max(),
                  "cu_seqlens must have at most 2^31 - 1 sequences, got ", N);
  lengths_.reserve(N);
  for (size_t s = 0; s < N; ++s) {
    const int64_t length = offsets[s + 1] - offsets[s];
    const int64_t room = starts_[s + 1] - starts_[s];
    CROSSDOCK_CHECK(length <= room, "sequence ", s, " has ", length,
                    " tokens by cu_seqlens, but only ", room,
                    " by cu_seqlens_padded, which must not be less");
    lengths_.push_back(length);
  }
  num_tokens_ = args.num_tokens.value_or(starts_.back());
  CROSSDOCK_CHECK(starts_.back() <= num_tokens_, is_padded ? "cu_seqlens_padded" : "cu_seqlens",
                  "[", N, "] (", starts_.back(), ") must be at most num_tokens (", num_tokens_,
                  ")");
  CROSSDOCK_CHECK(num_tokens_ <= kMaxBytes, "num_tokens must be at most 2^60, got ", num_tokens_);
}

}  // namespace crossdock
