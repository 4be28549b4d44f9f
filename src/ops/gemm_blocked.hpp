#pragma once

// The blocked product behind every kernel of gemm.hpp. Included by one source file per instruction
// set, each compiled with its own flags and each supplying a vector unit `Unit`:
//
//   using Scalar, Vector; kLanes, kRows (rows of a register block), kVectors (vectors per row)
//   load, store, broadcast, zero, add, fma(a, b, c) = a * b + c
//   transpose(source, stride, target, target_stride): kLanes x kLanes scalars
//
// Everything here has internal linkage, so that code for one instruction set is never shared with
// another.

#include <cstdint>

#include "ops/gemm.hpp"

namespace crossdock::ops {
namespace {

template <typename Source, typename Scalar>
inline Scalar widen(Source value) {
  if constexpr (sizeof(Scalar) == 8) {
    return static_cast<Scalar>(value);
  } else {
    return to_float(value);
  }
}

template <int64_t kSize, typename Scalar>
inline void transpose_plainly(const Scalar* source, int64_t stride, Scalar* target,
                              int64_t target_stride) {
  for (int64_t i = 0; i < kSize; ++i) {
    for (int64_t j = 0; j < kSize; ++j) target[j * target_stride + i] = source[i * stride + j];
  }
}

template <typename Unit>
struct BlockedGemm {
  using Scalar = typename Unit::Scalar;
  using Vector = typename Unit::Vector;
  static constexpr int64_t kLanes = Unit::kLanes;
  static constexpr int64_t kRows = Unit::kRows;
  static constexpr int64_t kVectors = Unit::kVectors;
  static constexpr int64_t kColumns = kLanes * kVectors;
  static_assert(kGemmColumnMultiple % kColumns == 0);
  using Scratch = GemmScratch<Scalar>;

  // One register block: c[kN rows, kColumns] (+)= a[kN rows, depth] * b[depth, kColumns]. `a` is
  // packed with depth contiguous (kAlongK) or with the panel's rows contiguous.
  template <int64_t kN, bool kAlongK>
  static void multiply_block(const Scalar* a, const Scalar* b, int64_t depth, bool first, Scalar* c,
                             int64_t c_stride) {
    constexpr int64_t kRowStep = kAlongK ? kGemmBlockK : 1;
    constexpr int64_t kDepthStep = kAlongK ? 1 : kN;
    Vector sums[kN][kVectors];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kN; ++i) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) sums[i][v] = Unit::zero();
    }
    for (int64_t k = 0; k < depth; ++k) {
      Vector right[kVectors];
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) right[v] = Unit::load(b + v * kLanes);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kN; ++i) {
        const Vector left = Unit::broadcast(a + i * kRowStep);
#pragma GCC unroll 4
        for (int64_t v = 0; v < kVectors; ++v) sums[i][v] = Unit::fma(left, right[v], sums[i][v]);
      }
      a += kDepthStep;
      b += kColumns;
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kN; ++i) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        Scalar* out = c + i * c_stride + v * kLanes;
        Unit::store(out, first ? sums[i][v] : Unit::add(Unit::load(out), sums[i][v]));
      }
    }
  }

  using Block = void (*)(const Scalar*, const Scalar*, int64_t, bool, Scalar*, int64_t);

  // multiply_block for 1 to kRows rows.
  template <bool kAlongK, int64_t kN = kRows>
  static Block block_for(int64_t rows) {
    if constexpr (kN > 1) {
      if (rows < kN) return block_for<kAlongK, kN - 1>(rows);
    }
    return &multiply_block<kN, kAlongK>;
  }

  // Panels of kRows rows, [panel][row][kGemmBlockK] or [panel][depth][row].
  template <typename Source>
  static void pack_a(const GemmOperand& operand, int64_t rows, int64_t depth, Scalar* packed) {
    const auto* source = static_cast<const Source*>(operand.data);
    if (operand.k_stride == 1) {
      for (int64_t i = 0; i < rows; ++i) {
        const Source* from = source + i * operand.row_stride;
        Scalar* to = packed + i * kGemmBlockK;
        for (int64_t k = 0; k < depth; ++k) to[k] = widen<Source, Scalar>(from[k]);
      }
      return;
    }
    for (int64_t begin = 0; begin < rows; begin += kRows) {
      const int64_t panel_rows = rows - begin < kRows ? rows - begin : kRows;
      Scalar* to = packed + begin * kGemmBlockK;
      for (int64_t k = 0; k < depth; ++k, to += panel_rows) {
        const Source* from = source + begin + k * operand.k_stride;
        if (panel_rows == kRows) {  // a fixed count, so that it becomes a few vector moves
          for (int64_t i = 0; i < kRows; ++i) to[i] = widen<Source, Scalar>(from[i]);
        } else {
          for (int64_t i = 0; i < panel_rows; ++i) to[i] = widen<Source, Scalar>(from[i]);
        }
      }
    }
  }

  // Panels of kColumns columns, [panel][depth][column]; columns past the last one are zero.
  template <typename Source>
  static void pack_b(const GemmOperand& operand, int64_t columns, int64_t depth, Scratch& scratch) {
    for (int64_t begin = 0; begin < columns; begin += kColumns) {
      const int64_t width = columns - begin < kColumns ? columns - begin : kColumns;
      Scalar* to = scratch.b + begin * kGemmBlockK;
      const auto* from = static_cast<const Source*>(operand.data) + begin * operand.row_stride;
      if (operand.k_stride == 1) {
        pack_transposed(from, operand.row_stride, width, depth, scratch.panel, to);
        continue;
      }
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t j = 0; j < width; ++j) {
          to[k * kColumns + j] = widen<Source, Scalar>(from[k * operand.k_stride + j]);
        }
        for (int64_t j = width; j < kColumns; ++j) to[k * kColumns + j] = Scalar{0};
      }
    }
  }

  // from [width, depth] -> to [depth, kColumns].
  template <typename Source>
  static void pack_transposed(const Source* from, int64_t stride, int64_t width, int64_t depth,
                              Scalar* panel, Scalar* to) {
    const bool is_plain = sizeof(Source) == sizeof(Scalar) && width == kColumns;
    const Scalar* source = reinterpret_cast<const Scalar*>(from);
    int64_t source_stride = stride;
    if (!is_plain) {
      for (int64_t j = 0; j < kColumns; ++j) {
        for (int64_t k = 0; k < depth; ++k) {
          panel[j * kGemmBlockK + k] =
              j < width ? widen<Source, Scalar>(from[j * stride + k]) : Scalar{0};
        }
      }
      source = panel;
      source_stride = kGemmBlockK;
    }
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      for (int64_t v = 0; v < kVectors; ++v) {
        Unit::transpose(source + v * kLanes * source_stride + k, source_stride,
                        to + k * kColumns + v * kLanes, kColumns);
      }
    }
    for (; k < depth; ++k) {
      for (int64_t j = 0; j < kColumns; ++j) to[k * kColumns + j] = source[j * source_stride + k];
    }
  }

  static GemmOperand slice(const GemmOperand& operand, int64_t row, int64_t k) {
    const auto* bytes = static_cast<const std::byte*>(operand.data);
    const int64_t offset = row * operand.row_stride + k * operand.k_stride;
    return {bytes + offset * size_of(operand.dtype), operand.dtype, operand.row_stride,
            operand.k_stride};
  }

  template <typename Pack>
  static void with_source(DType dtype, const Pack& pack) {
    if constexpr (sizeof(Scalar) == 8) {
      pack(double{});
    } else if (dtype == DType::kBF16) {
      pack(BF16{});
    } else if (dtype == DType::kF16) {
      pack(F16{});
    } else {
      pack(float{});
    }
  }

  // All register blocks of one packed tile; a panel of a stays in the first-level cache.
  template <bool kAlongK>
  static void multiply_packed(const Scratch& scratch, int64_t depth, bool first,
                              const GemmArgs<Scalar>& tile) {
    for (int64_t i = 0; i < tile.M; i += kRows) {
      const int64_t rows = tile.M - i < kRows ? tile.M - i : kRows;
      const Block block = block_for<kAlongK>(rows);
      for (int64_t j = 0; j < tile.N; j += kColumns) {
        block(scratch.a + i * kGemmBlockK, scratch.b + j * kGemmBlockK, depth, first,
              tile.c + i * tile.c_stride + j, tile.c_stride);
      }
    }
  }

  // A tile of at most kGemmTileRows x kGemmTileColumns.
  static void multiply_tile(const GemmArgs<Scalar>& tile, Scratch& scratch) {
    for (int64_t k = 0; k < tile.K || k == 0; k += kGemmBlockK) {
      const int64_t depth = tile.K - k < kGemmBlockK ? tile.K - k : kGemmBlockK;
      const GemmOperand a = slice(tile.a, 0, k);
      const GemmOperand b = slice(tile.b, 0, k);
      with_source(a.dtype, [&](auto type) { pack_a<decltype(type)>(a, tile.M, depth, scratch.a); });
      with_source(b.dtype, [&](auto type) { pack_b<decltype(type)>(b, tile.N, depth, scratch); });
      if (a.k_stride == 1) {
        multiply_packed<true>(scratch, depth, k == 0, tile);
      } else {
        multiply_packed<false>(scratch, depth, k == 0, tile);
      }
    }
  }

  static void run(const GemmArgs<Scalar>& args, Scratch& scratch) {
    for (int64_t j = 0; j < args.N; j += kGemmTileColumns) {
      for (int64_t i = 0; i < args.M; i += kGemmTileRows) {
        GemmArgs<Scalar> tile = args;
        tile.a = slice(args.a, i, 0);
        tile.b = slice(args.b, j, 0);
        tile.c = args.c + i * args.c_stride + j;
        tile.M = args.M - i < kGemmTileRows ? args.M - i : kGemmTileRows;
        tile.N = args.N - j < kGemmTileColumns ? args.N - j : kGemmTileColumns;
        multiply_tile(tile, scratch);
      }
    }
  }
};

}  // namespace
}  // namespace crossdock::ops
