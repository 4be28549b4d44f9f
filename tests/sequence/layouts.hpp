#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "crossdock/sequence.hpp"

namespace crossdock {

inline ConstTensorView view_of(const std::vector<int64_t>& values) {
  return {values.data(), Shape{std::ssize(values)}};
}

/// Offsets of sequences with these lengths, [N + 1].
inline std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets{0};
  for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

/// Sequences padded to multiples of `alignment`, then `tail` padding tokens.
inline PackedSequences pack(const std::vector<int64_t>& lengths, int64_t alignment = 1,
                            int64_t tail = 0) {
  std::vector<int64_t> padded;
  for (const int64_t length : lengths) padded.push_back(align_num_tokens(length, alignment));
  const std::vector<int64_t> offsets = offsets_of(lengths);
  const std::vector<int64_t> starts = offsets_of(padded);
  return PackedSequences(PackedSequencesArgs{.cu_seqlens = view_of(offsets),
                                             .cu_seqlens_padded = view_of(starts),
                                             .num_tokens = starts.back() + tail});
}

inline std::string name_of(const SequenceLayout& layout) {
  std::string name = "B " + std::to_string(layout.batch) + " L " + std::to_string(layout.length) +
                     " ranks " + std::to_string(layout.num_ranks);
  if (layout.order == TokenOrder::kSequenceFirst) name += " sequence-first";
  if (layout.cut == SequenceCut::kZigzag) name += " zigzag";
  if (!layout.packed) return name;
  name += " packed";
  for (const int64_t start : layout.packed->starts()) name += " " + std::to_string(start);
  return name + " of " + std::to_string(layout.packed->num_tokens());
}

/// The rank that holds a position of a sequence, by the definition of the cuts.
inline int owner_of(const SequenceLayout& layout, int64_t length, int64_t position) {
  const int n = layout.num_ranks;
  if (layout.cut == SequenceCut::kContiguous) {
    return static_cast<int>(position / ((length + n - 1) / n));
  }
  const auto chunk = static_cast<int>(position / ((length + 2 * n - 1) / (2 * n)));
  return chunk < n ? chunk : 2 * n - 1 - chunk;
}

/// The global indices of a rank's tokens, by loops over all tokens.
inline std::vector<int64_t> expected_tokens(const SequenceLayout& layout, int rank) {
  std::vector<int64_t> tokens;
  const auto append = [&](int64_t start, int64_t length, int64_t width) {
    for (int64_t p = 0; p < length; ++p) {
      if (owner_of(layout, length, p) != rank) continue;
      for (int64_t w = 0; w < width; ++w) tokens.push_back(start + p * width + w);
    }
  };
  if (layout.packed) {
    const auto starts = layout.packed->starts();
    for (size_t s = 0; s + 1 < starts.size(); ++s) {
      append(starts[s], starts[s + 1] - starts[s], 1);
    }
    append(starts.back(), layout.packed->num_tokens() - starts.back(), 1);
  } else if (layout.order == TokenOrder::kSequenceFirst) {
    append(0, layout.length, layout.batch);
  } else {
    for (int64_t b = 0; b < layout.batch; ++b) append(b * layout.length, layout.length, 1);
  }
  return tokens;
}

/// All orders and cuts of B sequences of L tokens.
inline std::vector<SequenceLayout> list_dense_layouts(int64_t batch, int64_t length,
                                                      int num_ranks) {
  std::vector<SequenceLayout> layouts;
  for (const auto order : {TokenOrder::kBatchFirst, TokenOrder::kSequenceFirst}) {
    for (const auto cut : {SequenceCut::kContiguous, SequenceCut::kZigzag}) {
      layouts.push_back(
          {.batch = batch, .length = length, .num_ranks = num_ranks, .order = order, .cut = cut});
    }
  }
  return layouts;
}

/// All B <= 4, L <= 17 and up to 8 ranks.
inline void for_dense_layouts(const std::function<void(const SequenceLayout&)>& body) {
  for (int64_t batch = 0; batch <= 4; ++batch) {
    for (int64_t length = 0; length <= 17; ++length) {
      for (int ranks = 1; ranks <= 8; ++ranks) {
        for (const SequenceLayout& layout : list_dense_layouts(batch, length, ranks)) body(layout);
      }
    }
  }
}

/// Up to three sequences, including empty ones, with and without padding, on up to 8 ranks.
inline void for_packed_layouts(const std::function<void(const SequenceLayout&)>& body) {
  const std::vector<std::vector<int64_t>> all_lengths = {
      {}, {0}, {1}, {17}, {16, 16}, {0, 5}, {3, 0, 9}, {7, 1, 0}, {2, 13, 4}, {0, 0, 6}};
  for (const std::vector<int64_t>& lengths : all_lengths) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (const int64_t alignment : {1, 3, 2 * ranks}) {
        for (const int64_t tail : {0, 5}) {
          for (const auto cut : {SequenceCut::kContiguous, SequenceCut::kZigzag}) {
            body({.num_ranks = ranks, .cut = cut, .packed = pack(lengths, alignment, tail)});
          }
        }
      }
    }
  }
}

}  // namespace crossdock
