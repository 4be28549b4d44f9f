#pragma once

#include <cstdint>

#include "crossdock/experts.hpp"
#include "ops/row_chunks.cuh"

namespace crossdock::ops {

// Rows of gates and linear values, or of plain values, in chunks.

/// Where the values of a hidden row are.
struct HiddenLayout {
  int64_t F;
  int64_t width;  // 2F or F
  bool interleaved;
};

/// The hidden values of one chunk of activations, as they are stored.
template <Activation kKind, typename Element>
struct HiddenChunk {
  Chunk<Element> gate;    // of a plain activation: its only value
  Chunk<Element> linear;  // of a gated activation only
};

/// Separates the gates and linear values in two adjacent chunks of an interleaved row; `gate` is
/// the first chunk.
template <typename Element>
__device__ inline void split_pairs(Chunk<Element>& gate, Chunk<Element>& linear) {
  constexpr int kCount = cuda::kWide<Element>;
  const Chunk<Element> halves[2] = {gate, linear};
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    gate.elements[j] = halves[2 * j / kCount].elements[2 * j % kCount];
    linear.elements[j] = halves[2 * j / kCount].elements[2 * j % kCount + 1];
  }
}

/// The inverse.
template <typename Element>
__device__ inline void join_pairs(Chunk<Element>& gate, Chunk<Element>& linear) {
  constexpr int kCount = cuda::kWide<Element>;
  Chunk<Element> halves[2];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    halves[2 * j / kCount].elements[2 * j % kCount] = gate.elements[j];
    halves[2 * j / kCount].elements[2 * j % kCount + 1] = linear.elements[j];
  }
  gate = halves[0];
  linear = halves[1];
}

/// The hidden values of activations [column, column + kWide) of a row.
template <Activation kKind, bool kAligned, typename Element>
__device__ inline HiddenChunk<kKind, Element> load_hidden(const Element* row, int64_t column,
                                                          const HiddenLayout& layout) {
  HiddenChunk<kKind, Element> chunk;
  if constexpr (!is_gated(kKind)) {
    chunk.gate = load_chunk_once<kAligned>(row, column, layout.F);
  } else if (layout.interleaved) {
    chunk.gate = load_chunk_once<kAligned>(row, 2 * column, layout.width);
    chunk.linear = load_chunk_once<kAligned>(row, 2 * column + cuda::kWide<Element>, layout.width);
    split_pairs(chunk.gate, chunk.linear);
  } else {
    chunk.gate = load_chunk_once<kAligned>(row, column, layout.F);
    chunk.linear = load_chunk_once<kAligned>(row + layout.F, column, layout.F);
  }
  return chunk;
}

template <Activation kKind, bool kAligned, typename Element>
__device__ inline void store_hidden(Element* row, int64_t column, const HiddenLayout& layout,
                                    HiddenChunk<kKind, Element> chunk) {
  if constexpr (!is_gated(kKind)) {
    store_chunk<kAligned>(row, column, layout.F, chunk.gate);
  } else if (layout.interleaved) {
    join_pairs(chunk.gate, chunk.linear);
    store_chunk<kAligned>(row, 2 * column, layout.width, chunk.gate);
    store_chunk<kAligned>(row, 2 * column + cuda::kWide<Element>, layout.width, chunk.linear);
  } else {
    store_chunk<kAligned>(row, column, layout.F, chunk.gate);
    store_chunk<kAligned>(row + layout.F, column, layout.F, chunk.linear);
  }
}

}  // namespace crossdock::ops
