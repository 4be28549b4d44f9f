#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "crossdock/dtype.hpp"
#include "ops/gemm.hpp"
#include "router/choice.hpp"
#include "router/cuda/kernels.hpp"

// fp32 products on a GPU with the bits of ops::gemm: k runs in blocks of ops::kGemmBlockK, within a
// block fma from +0 in ascending order, and the sums of the blocks are added in ascending order.

namespace crossdock::router {

/// The tile of the result that a block of threads computes; a thread has kThreadRows x 4 elements.
template <int kTileRows, int kTileColumns, int kRowsPerThread>
struct FmaTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kThreadRows = kRowsPerThread;
  static constexpr int kThreadColumns = 4;
  static constexpr int kThreadsAcross = kColumns / kThreadColumns;
  static constexpr int kThreads = kRows / kThreadRows * kThreadsAcross;
  static constexpr int kDepth = 16;  // k in shared memory at a time
  static_assert(ops::kGemmBlockK % kDepth == 0 && kThreadRows % 4 == 0);
};
using WideFmaTile = FmaTile<64, 64, 8>;   // 128 threads
using SmallFmaTile = FmaTile<32, 32, 4>;  // 64 threads, for few rows or columns

/// A matrix in memory with elements of any float type, read four adjacent elements at a time.
struct DeviceMatrix {
  const void* values;
  DType dtype;      // fp32, bf16 or fp16
  int64_t stride;   // elements from row to row
  bool is_aligned;  // groups of four elements, counted from the start of a row, are

  /// REQUIRES: column is a multiple of 4.
  __device__ void read(int64_t row, int64_t column, int64_t end_column, float (&out)[4]) const {
    if (dtype == DType::kF32) return read_as<float>(row, column, end_column, out);
    if (dtype == DType::kBF16) return read_as<BF16>(row, column, end_column, out);
    read_as<F16>(row, column, end_column, out);
  }

 private:
  template <typename Element>
  struct alignas(4 * sizeof(Element)) Four {
    Element elements[4];
  };

  // Zero from end_column on.
  template <typename Element>
  __device__ void read_as(int64_t row, int64_t column, int64_t end_column, float (&out)[4]) const {
    const Element* from = static_cast<const Element*>(values) + row * stride + column;
    if (is_aligned && column + 4 <= end_column) {
      const Four<Element> four = *reinterpret_cast<const Four<Element>*>(from);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = to_float(four.elements[j]);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = column + j < end_column ? to_float(from[j]) : 0.0f;
  }
};

inline DeviceMatrix device_matrix(const void* values, DType dtype, int64_t stride) {
  const auto group_bytes = static_cast<uintptr_t>(4 * size_of(dtype));
  const bool is_aligned = reinterpret_cast<uintptr_t>(values) % group_bytes == 0 && stride % 4 == 0;
  return {values, dtype, stride, is_aligned};
}

/// An operand [num_rows, K] whose element (i, k) is matrix[i, k]. `Matrix` reads like DeviceMatrix.
template <typename Matrix>
struct OperandByRows {
  static constexpr bool kIsAlongK = true;
  Matrix matrix;
  int64_t num_rows;

  /// Elements (i, k) to (i, k + 3); zero outside the operand.
  __device__ void read(int64_t i, int64_t k, int64_t end_k, float (&out)[4]) const {
    if (i < num_rows && k < end_k) return matrix.read(i, k, end_k, out);
    out[0] = out[1] = out[2] = out[3] = 0.0f;
  }
};

/// An operand [num_rows, K] whose element (i, k) is matrix[k, i].
template <typename Matrix>
struct OperandByColumns {
  static constexpr bool kIsAlongK = false;
  Matrix matrix;
  int64_t num_rows;

  /// Elements (i, k) to (i + 3, k); zero outside the operand.
  __device__ void read(int64_t i, int64_t k, int64_t end_k, float (&out)[4]) const {
    if (i < num_rows && k < end_k) return matrix.read(k, i, num_rows, out);
    out[0] = out[1] = out[2] = out[3] = 0.0f;
  }
};

/// A part of an operand in shared memory: kSize rows of it, by k.
template <int kSize, int kThreads, int kDepth>
struct alignas(16) FmaStage {
  static constexpr int kQuads = kSize * kDepth / 4 / kThreads;  // of a thread
  static_assert(kQuads * 4 * kThreads == kSize * kDepth);
  using Quads = float[kQuads][4];

  float values[kDepth][kSize + 4];

  template <typename Operand>
  static __device__ void read(const Operand& operand, int64_t row, int64_t k, int64_t end_k,
                              Quads& quads) {
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const int quad = static_cast<int>(threadIdx.x) + n * kThreads;
      if constexpr (Operand::kIsAlongK) {
        operand.read(row + quad / (kDepth / 4), k + quad % (kDepth / 4) * 4, end_k, quads[n]);
      } else {
        operand.read(row + quad % (kSize / 4) * 4, k + quad / (kSize / 4), end_k, quads[n]);
      }
    }
  }

  template <typename Operand>
  __device__ void store(const Quads& quads) {
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const int quad = static_cast<int>(threadIdx.x) + n * kThreads;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (Operand::kIsAlongK) {
          values[quad % (kDepth / 4) * 4 + j][quad / (kDepth / 4)] = quads[n][j];
        } else {
          values[quad / (kSize / 4)][quad % (kSize / 4) * 4 + j] = quads[n][j];
        }
      }
    }
  }
};

/// The part of a product that a block of threads computes.
struct FmaPart {
  int64_t row;      // the tile's first
  int64_t column;   // the tile's first
  int64_t begin_k;  // a multiple of kDepth; blocks of ops::kGemmBlockK begin at multiples of that
  int64_t end_k;
};

/// A thread's elements of a tile.
template <int kRows>
struct FmaSums {
  float sums[kRows][4] = {};    // of the current block of k
  float totals[kRows][4] = {};  // of the blocks before it

  __device__ void add(const float* from_a, const float* from_b) {
    float a[kRows];
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from_a + i);
      a[i] = four.x, a[i + 1] = four.y, a[i + 2] = four.z, a[i + 3] = four.w;
    }
    const float4 four = *reinterpret_cast<const float4*>(from_b);
    const float b[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
  }

  __device__ void end_block(bool is_first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        totals[i][j] = is_first ? sums[i][j] : totals[i][j] + sums[i][j];
        sums[i][j] = 0.0f;
      }
    }
  }
};

/// c[i, j] = sum over k in [begin_k, end_k) of a[i, k] * b[j, k] for one tile. Calls
/// store(i, j, values) with the four results from column j on, also outside the product. All
/// threads of the block must call it.
template <typename Tile, typename A, typename B, typename Store>
__device__ void fma_product(const A& a, const B& b, const FmaPart& part, const Store& store) {
  using StageA = FmaStage<Tile::kRows, Tile::kThreads, Tile::kDepth>;
  using StageB = FmaStage<Tile::kColumns, Tile::kThreads, Tile::kDepth>;
  __shared__ StageA stages_a[2];
  __shared__ StageB stages_b[2];
  const int own_row = static_cast<int>(threadIdx.x) / Tile::kThreadsAcross * Tile::kThreadRows;
  const int own_column = static_cast<int>(threadIdx.x) % Tile::kThreadsAcross * 4;
  FmaSums<Tile::kThreadRows> own;
  typename StageA::Quads quads_a;
  typename StageB::Quads quads_b;
  StageA::read(a, part.row, part.begin_k, part.end_k, quads_a);
  StageB::read(b, part.column, part.begin_k, part.end_k, quads_b);
  int stage = 0;
  for (int64_t k = part.begin_k; k < part.end_k; k += Tile::kDepth) {
    stages_a[stage].template store<A>(quads_a);
    stages_b[stage].template store<B>(quads_b);
    __syncthreads();
    const int64_t next = k + Tile::kDepth;
    if (next < part.end_k) {
      StageA::read(a, part.row, next, part.end_k, quads_a);
      StageB::read(b, part.column, next, part.end_k, quads_b);
    }
#pragma unroll
    for (int depth = 0; depth < Tile::kDepth; ++depth) {
      own.add(&stages_a[stage].values[depth][own_row], &stages_b[stage].values[depth][own_column]);
    }
    if (next % ops::kGemmBlockK == 0 || next >= part.end_k) {
      own.end_block(k < part.begin_k + ops::kGemmBlockK);
    }
    stage ^= 1;
  }
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; ++i) {
    store(part.row + own_row + i, part.column + own_column, own.totals[i]);
  }
}

__device__ inline TokenJitter<float> jitter_of_token(const BatchJitter& jitter, int64_t token) {
  return {jitter.size, jitter.seed, jitter.token_ids != nullptr ? jitter.token_ids[token] : token};
}

/// Tokens x [T, D] as the gate sees them: times the jitter, zero in padding.
struct TokenMatrix {
  DeviceMatrix x;
  BatchJitter jitter;
  const int32_t* sequences;  // [T]; negative: padding; null: no token is zero

  /// Four values of a token from column d on; zero from D on. REQUIRES: d is a multiple of 4.
  __device__ void read(int64_t token, int64_t d, int64_t D, float (&out)[4]) const {
    if (sequences != nullptr && sequences[token] < 0) {
      out[0] = out[1] = out[2] = out[3] = 0.0f;
      return;
    }
    x.read(token, d, D, out);
    if (jitter.size == 0.0f) return;
    const TokenJitter<float> factors = jitter_of_token(jitter, token);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] *= factors.factor(d + j);
  }
};

/// The gate's bias of an expert; 0 without biases.
__device__ inline float bias_of(const LogitsArgs& args, int64_t e) {
  if (args.bias == nullptr) return 0.0f;
  if (args.gate_dtype == DType::kF32) return static_cast<const float*>(args.bias)[e];
  if (args.gate_dtype == DType::kBF16) return to_float(static_cast<const BF16*>(args.bias)[e]);
  return to_float(static_cast<const F16*>(args.bias)[e]);
}

}  // namespace crossdock::router
