#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/element.cuh"
#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/product_params.hpp"
#include "ops/cuda/hopper/tile_shape.hpp"

// From the sums of a tile to the output. Every warp stores its own 16 rows, 128 bytes at a time,
// through a buffer in shared memory, so that global memory is written in pieces of 16 bytes.

namespace crossdock::ops::hopper {

/// 16 rows of a tile, held by one warp.
struct WarpRows {
  int64_t row;   // the first one, in the output
  int num_rows;  // inside the output; may exceed 16, or be 0 or less
  int column_tile;
  int expert;
};

/// A warp's buffer of 16 rows x 128 bytes. To avoid bank conflicts, piece p (16 bytes) of row r is
/// stored at the place of piece p ^ swizzle(r), where swizzle(r) is the same for rows r and r + 8
/// and differs by two between adjacent rows. Addresses are written so that few registers hold all
/// of them.
template <int kBuffers>
class WarpStage {
 public:
  /// `memory` is a multiple of 128.
  __device__ WarpStage(SharedAddress memory, int lane) : memory_(memory), lane_(lane) {}

  /// Sums of 64 columns as wgmma leaves them, rounded to 16 bits: values[j][h] has columns 8j + 2t
  /// and 8j + 2t + 1 of row g + 8h, in lane 4g + t.
  __device__ __forceinline__ void put_pairs(const uint32_t (&values)[8][2]) {
    begin();
    // The lane gives the address of one row of one of four 8 x 8 matrices.
    const int row = lane_ % 16;
    const SharedAddress first = buffer() + row * 128 + ((lane_ / 16 ^ swizzle(row)) << 4);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       first ^ (j << 4)),
                   "r"(values[j][0]), "r"(values[j][1]), "r"(values[j + 1][0]),
                   "r"(values[j + 1][1])
                   : "memory");
    }
  }

  /// values[j][h] has bytes 32j + 8t to 32j + 8t + 7 of row g + 8h, in lane 4g + t.
  __device__ __forceinline__ void put_quads(const uint2 (&values)[4][2]) {
    begin();
    const int row = lane_ / 4;
    const int t = lane_ % 4;
    const SharedAddress first = buffer() + row * 128 + ((t / 2 ^ swizzle(row)) << 4) + t % 2 * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"((first ^ (j << 5)) + h * 8 * 128),
                     "r"(values[j][h].x), "r"(values[j][h].y)
                     : "memory");
      }
    }
  }

  // Then, after __syncwarp(), each lane takes kPieces pieces: piece i is piece_column() of row
  // piece_row(i).
  static constexpr int kPieces = 4;
  __device__ int piece_row(int i) const {
    return 4 * i + lane_ / 8;
  }
  __device__ int piece_column() const {
    return lane_ % 8;
  }
  __device__ uint4 piece(int i) const {
    const SharedAddress first =
        buffer() + lane_ / 8 * 128 + ((piece_column() ^ swizzle(lane_ / 8)) << 4);
    uint4 value{};
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"((first ^ (i % 2 << 4)) + i * 4 * 128)
                 : "memory");
    return value;
  }

  /// Copies the rows to global memory: num_rows rows (at most 16) of num_bytes bytes (at most 128).
  __device__ __forceinline__ void copy_out(std::byte* to, int64_t pitch, int num_rows,
                                           int num_bytes) const {
    __syncwarp();
    if (piece_column() * 16 >= num_bytes) return;
    std::byte* const own = to + piece_column() * 16;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (piece_row(i) < num_rows) *reinterpret_cast<uint4*>(own + piece_row(i) * pitch) = piece(i);
    }
  }

 private:
  // The buffer must not be written while a lane reads it. With two buffers, the __syncwarp()
  // between writing and reading the other one ensures that.
  __device__ void begin() {
    if constexpr (kBuffers == 1) __syncwarp();
    ++num_uses_;
  }
  // Known at compile time: calls are inlined and loops unrolled.
  __device__ SharedAddress buffer() const {
    return memory_ + num_uses_ % kBuffers * kStageBytes;
  }
  // piece() relies on this: swizzle(4i + r) is swizzle(r) + i % 2, for r < 4.
  static __device__ int swizzle(int row) {
    return (row & 3) << 1 | (row >> 2 & 1);
  }

  SharedAddress memory_;
  int lane_;
  int num_uses_ = 0;
};

/// Keeps the compiler from reading global memory in advance, which would take registers.
__device__ inline void read_no_further() {
  asm volatile("" ::: "memory");
}

/// Adds the bias of the rows' expert, if there is one.
template <typename Element, int kColumns>
__device__ __forceinline__ void add_bias(float (&sums)[kColumns / 2], const WarpRows& rows,
                                         const ProductParams& params, int out_columns, int lane) {
  if (params.bias == nullptr) return;
  const auto* bias = static_cast<const Element*>(params.bias) + int64_t{rows.expert} * params.N;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int column = rows.column_tile * kColumns + 8 * j + 2 * (lane % 4);
    if (column >= out_columns) break;
    const float2 b = unpack<Element>(*reinterpret_cast<const uint32_t*>(bias + column));
    sums[4 * j] += b.x;
    sums[4 * j + 1] += b.y;
    sums[4 * j + 2] += b.x;
    sums[4 * j + 3] += b.y;
    if (j % 4 == 3) read_no_further();
  }
}

/// Rows of the product, rounded; kWithBias: plus the bias, if there is one.
template <typename Element, int kColumns, bool kWithBias>
struct RowsEpilogue {
  static constexpr bool kIsGated = false;
  static constexpr bool kZeroesEmpty = true;  // gradients of experts without rows
  static constexpr int kOutBytes = sizeof(Element);

  template <typename Stage>
  static __device__ __forceinline__ void store(float (&sums)[kColumns / 2], const WarpRows& rows,
                                               Stage& stage, const ProductParams& params,
                                               int out_columns, int lane) {
    const int first = rows.column_tile * kColumns;
    if (kWithBias) add_bias<Element, kColumns>(sums, rows, params, out_columns, lane);
    auto* const out = static_cast<Element*>(params.out) + rows.row * out_columns + first;
#pragma unroll
    for (int c = 0; c < kColumns / 64; ++c) {
      uint32_t values[8][2];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = 32 * c + 4 * j;
        values[j][0] = pack<Element>(sums[i], sums[i + 1]);
        values[j][1] = pack<Element>(sums[i + 2], sums[i + 3]);
      }
      stage.put_pairs(values);
      stage.copy_out(reinterpret_cast<std::byte*>(out + 64 * c), int64_t{out_columns} * kOutBytes,
                     rows.num_rows, (out_columns - first - 64 * c) * kOutBytes);
    }
  }
};

/// Whether SwiGLU also stores the product, and in which order.
enum class Hidden : uint8_t { kNone, kGatesFirst, kInterleaved };

/// SwiGLU. The tile's columns are 8 gates, their 8 linear values, 8 gates and so on, whatever the
/// order in w: so every lane has gates together with their linear values.
template <typename Element, int kColumns, Hidden kHidden>
struct SwigluEpilogue {
  static_assert(kColumns % 128 == 0);
  static constexpr bool kIsGated = true;
  static constexpr bool kZeroesEmpty = false;
  static constexpr int kOutBytes = sizeof(Element);

  template <typename Stage>
  static __device__ __forceinline__ void store(float (&sums)[kColumns / 2], const WarpRows& rows,
                                               Stage& stage, const ProductParams& params,
                                               int out_columns, int lane) {
    const int F = out_columns / 2;
    const int first = rows.column_tile * (kColumns / 2);
    if (params.bias != nullptr) add_bias(sums, rows, params, F, lane);
#pragma unroll
    for (int c = 0; c < kColumns / 128; ++c) {
      uint32_t gates[8][2];
      uint32_t linear[8][2];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = 64 * c + 8 * j;
        gates[j][0] = pack<Element>(sums[i], sums[i + 1]);
        gates[j][1] = pack<Element>(sums[i + 2], sums[i + 3]);
        linear[j][0] = pack<Element>(sums[i + 4], sums[i + 5]);
        linear[j][1] = pack<Element>(sums[i + 6], sums[i + 7]);
      }
      const int feature = first + 64 * c;
      store_hidden(gates, linear, rows, stage, params, feature, F);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 gate = unpack<Element>(gates[j][h]);
          const float2 line = unpack<Element>(linear[j][h]);
          gates[j][h] = pack<Element>(swiglu(gate.x, line.x), swiglu(gate.y, line.y));
        }
      }
      auto* const out = static_cast<Element*>(params.out) + rows.row * F + feature;
      stage.put_pairs(gates);
      stage.copy_out(reinterpret_cast<std::byte*>(out), int64_t{F} * kOutBytes, rows.num_rows,
                     (F - feature) * kOutBytes);
    }
  }

 private:
  static __device__ __forceinline__ void add_bias(float (&sums)[kColumns / 2], const WarpRows& rows,
                                                  const ProductParams& params, int F, int lane) {
    const auto* bias = static_cast<const Element*>(params.bias) + int64_t{rows.expert} * params.N;
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      const int feature = rows.column_tile * (kColumns / 2) + 8 * j + 2 * (lane % 4);
      if (feature >= F) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int gate = (feature + i) * params.gates.step;
        const float gate_bias = to_float(bias[gate]);
        const float linear_bias = to_float(bias[gate + params.gates.linear_offset]);
        sums[8 * j + i] += gate_bias;
        sums[8 * j + 2 + i] += gate_bias;
        sums[8 * j + 4 + i] += linear_bias;
        sums[8 * j + 6 + i] += linear_bias;
      }
      read_no_further();
    }
  }

  // 64 features of the product, from `feature` on.
  template <typename Stage>
  static __device__ __forceinline__ void store_hidden(const uint32_t (&gates)[8][2],
                                                      const uint32_t (&linear)[8][2],
                                                      const WarpRows& rows, Stage& stage,
                                                      const ProductParams& params, int feature,
                                                      int F) {
    auto* const hidden = static_cast<Element*>(params.hidden) + rows.row * 2 * F;
    const int64_t pitch = int64_t{2} * F * kOutBytes;
    if constexpr (kHidden == Hidden::kGatesFirst) {
      const int num_bytes = (F - feature) * kOutBytes;
      stage.put_pairs(gates);
      stage.copy_out(reinterpret_cast<std::byte*>(hidden + feature), pitch, rows.num_rows,
                     num_bytes);
      stage.put_pairs(linear);
      stage.copy_out(reinterpret_cast<std::byte*>(hidden + F + feature), pitch, rows.num_rows,
                     num_bytes);
    } else if constexpr (kHidden == Hidden::kInterleaved) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 32 features: 128 bytes
        uint2 values[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t gate = gates[4 * half + j][h];
            const uint32_t line = linear[4 * half + j][h];
            values[j][h] = make_uint2(__byte_perm(gate, line, 0x5410),   // low halves
                                      __byte_perm(gate, line, 0x7632));  // high halves
          }
        }
        const int first = feature + 32 * half;
        stage.put_quads(values);
        stage.copy_out(reinterpret_cast<std::byte*>(hidden + 2 * first), pitch, rows.num_rows,
                       2 * (F - first) * kOutBytes);
      }
    }
  }
};

/// Sums in fp32, written or added to the output.
template <int kColumns, bool kAccumulate>
struct SumsEpilogue {
  static constexpr bool kIsGated = false;
  static constexpr bool kZeroesEmpty = !kAccumulate;
  static constexpr int kOutBytes = sizeof(float);

  template <typename Stage>
  static __device__ __forceinline__ void store(float (&sums)[kColumns / 2], const WarpRows& rows,
                                               Stage& stage, const ProductParams& params,
                                               int out_columns, int /*lane*/) {
    constexpr int kChunks = kColumns / 32;
    const int first = rows.column_tile * kColumns;
    const int64_t pitch = int64_t{out_columns} * kOutBytes;
    auto* const out =
        reinterpret_cast<std::byte*>(static_cast<float*>(params.out) + rows.row * out_columns) +
        int64_t{first} * kOutBytes;
    const int num_bytes = (out_columns - first) * kOutBytes;
    float4 old[2][Stage::kPieces];  // of this chunk and the next
    if constexpr (kAccumulate) read(old[0], rows, stage, out, pitch, num_bytes);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint2 values[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 16 * c + 4 * j;
        values[j][0] = make_uint2(__float_as_uint(sums[i]), __float_as_uint(sums[i + 1]));
        values[j][1] = make_uint2(__float_as_uint(sums[i + 2]), __float_as_uint(sums[i + 3]));
      }
      std::byte* const to = out + 128 * c;
      stage.put_quads(values);
      if constexpr (kAccumulate) {
        if (c + 1 < kChunks) {
          read(old[(c + 1) % 2], rows, stage, to + 128, pitch, num_bytes - 128 * (c + 1));
        }
        __syncwarp();
        add(old[c % 2], rows, stage, to, pitch, num_bytes - 128 * c);
      } else {
        stage.copy_out(to, pitch, rows.num_rows, num_bytes - 128 * c);
      }
    }
  }

 private:
  template <typename Stage>
  static __device__ float4* place(const Stage& stage, int i, std::byte* to, int64_t pitch) {
    return reinterpret_cast<float4*>(to + stage.piece_row(i) * pitch + stage.piece_column() * 16);
  }

  template <typename Stage>
  static __device__ __forceinline__ void read(float4 (&old)[Stage::kPieces], const WarpRows& rows,
                                              const Stage& stage, std::byte* from, int64_t pitch,
                                              int num_bytes) {
#pragma unroll
    for (int i = 0; i < Stage::kPieces; ++i) {
      const bool is_inside =
          stage.piece_row(i) < rows.num_rows && stage.piece_column() * 16 < num_bytes;
      if (is_inside) old[i] = *place(stage, i, from, pitch);
    }
  }

  template <typename Stage>
  static __device__ __forceinline__ void add(const float4 (&old)[Stage::kPieces],
                                             const WarpRows& rows, const Stage& stage,
                                             std::byte* to, int64_t pitch, int num_bytes) {
#pragma unroll
    for (int i = 0; i < Stage::kPieces; ++i) {
      const uint4 sum = stage.piece(i);
      const bool is_inside =
          stage.piece_row(i) < rows.num_rows && stage.piece_column() * 16 < num_bytes;
      if (!is_inside) continue;
      *place(stage, i, to, pitch) =
          make_float4(old[i].x + __uint_as_float(sum.x), old[i].y + __uint_as_float(sum.y),
                      old[i].z + __uint_as_float(sum.z), old[i].w + __uint_as_float(sum.w));
    }
  }
};

/// Sums in fp32, plus the bias, if there is one.
template <typename Element, int kColumns>
struct BiasedSumsEpilogue : SumsEpilogue<kColumns, false> {
  template <typename Stage>
  static __device__ __forceinline__ void store(float (&sums)[kColumns / 2], const WarpRows& rows,
                                               Stage& stage, const ProductParams& params,
                                               int out_columns, int lane) {
    add_bias<Element, kColumns>(sums, rows, params, out_columns, lane);
    SumsEpilogue<kColumns, false>::store(sums, rows, stage, params, out_columns, lane);
  }
};

/// Zeroes a warp's 16 rows: the weight gradient of an expert without rows.
template <int kColumns, int kOutBytes>
__device__ void zero_warp_rows(const WarpRows& rows, const ProductParams& params, int out_columns,
                               int lane) {
  constexpr int kPiecesPerRow = kColumns * kOutBytes / 16;
  const int first_byte = rows.column_tile * kColumns * kOutBytes;
  const int64_t pitch = int64_t{out_columns} * kOutBytes;
  auto* const out = static_cast<std::byte*>(params.out) + rows.row * pitch + first_byte;
  for (int i = lane; i < 16 * kPiecesPerRow; i += 32) {
    const int row = i / kPiecesPerRow;
    const int byte = i % kPiecesPerRow * 16;
    if (row < rows.num_rows && first_byte + byte < pitch) {
      *reinterpret_cast<uint4*>(out + row * pitch + byte) = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace crossdock::ops::hopper
