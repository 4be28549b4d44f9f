#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/dtype.hpp"
#include "ops/cuda/plain/products.hpp"
#include "ops/cuda/unused_rows.cuh"

namespace crossdock::ops::plain {

inline constexpr int kTile = 64;      // rows and columns of a block's tile
inline constexpr int kDepth = 32;     // of a step along the inner dimension
inline constexpr int kThreads = 128;  // warp w has rows 16w to 16w + 15

/// Both operands of a step in shared memory, lines along the inner dimension. Lines are padded so
/// that the lanes of a warp read different banks.
template <typename Element>
struct StepTiles {
  static constexpr int kPitch = kDepth + 16 / static_cast<int>(sizeof(Element));
  alignas(16) Element a[kTile][kPitch];
  alignas(16) Element b[kTile][kPitch];
};

/// A thread's sums: lane 4g + t has columns 8j + 2t and 8j + 2t + 1 of rows g (values[j][0], [1])
/// and g + 8 (values[j][2], [3]) of its warp.
struct TileSums {
  float values[kTile / 8][4] = {};
};

template <typename Element>
__device__ void mma(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ inline void mma<BF16>(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ inline void mma<F16>(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Adds the products of one step, in ascending order: on tensor cores for 16-bit values, which take
/// 16 products at a time.
template <typename Element>
__device__ void add_step(TileSums& sums, const StepTiles<Element>& tiles, int warp, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const auto pair = [](const Element* first) { return *reinterpret_cast<const uint32_t*>(first); };
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    const Element* const upper = &tiles.a[16 * warp + g][k + 2 * t];
    const Element* const lower = &tiles.a[16 * warp + g + 8][k + 2 * t];
    const uint32_t a[4] = {pair(upper), pair(lower), pair(upper + 8), pair(lower + 8)};
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const Element* const column = &tiles.b[8 * j + g][k + 2 * t];
      const uint32_t b[2] = {pair(column), pair(column + 8)};
      mma<Element>(sums.values[j], a, b);
    }
  }
}

/// In fp32, one product at a time.
template <>
__device__ inline void add_step(TileSums& sums, const StepTiles<float>& tiles, int warp, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  for (int k = 0; k < kDepth; ++k) {
    const float upper = tiles.a[16 * warp + g][k];
    const float lower = tiles.a[16 * warp + g + 8][k];
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const float left = tiles.b[8 * j + 2 * t][k];
      const float right = tiles.b[8 * j + 2 * t + 1][k];
      sums.values[j][0] = fmaf(upper, left, sums.values[j][0]);
      sums.values[j][1] = fmaf(upper, right, sums.values[j][1]);
      sums.values[j][2] = fmaf(lower, left, sums.values[j][2]);
      sums.values[j][3] = fmaf(lower, right, sums.values[j][3]);
    }
  }
}

/// An operand of a tile: [count, depth], where element (i, k) is data[i * stride + k *
/// depth_stride].
template <typename Element>
struct Operand {
  const Element* data;
  int64_t stride;
  int64_t depth_stride;
  int count;
  int depth;
};

/// Rows of w in the order of a tile's columns. Gated: 8 gates, their 8 linear values, 8 gates, and
/// so on, so that a thread has a gate together with its linear value.
struct ColumnOrder {
  bool is_gated;
  bool interleaved;
  int N;

  __device__ int row_of(int column) const {
    if (!is_gated) return column;
    const int feature = column / 16 * 8 + column % 8;
    const int is_linear = column / 8 % 2;
    if (feature >= N / 2) return N;  // none
    return interleaved ? 2 * feature + is_linear : feature + is_linear * (N / 2);
  }
};

/// Copies a step of an operand to shared memory, with zeros outside the operand. kAlongDepth:
/// adjacent threads read along the inner dimension, not across it, for coalesced reads.
template <bool kAlongDepth, typename Element, int kPitch, typename RowOf>
__device__ void load_step(Element (&tile)[kTile][kPitch], const Operand<Element>& operand,
                          int first, int first_depth, const RowOf& row_of) {
  for (int n = static_cast<int>(threadIdx.x); n < kTile * kDepth; n += kThreads) {
    const int i = kAlongDepth ? n / kDepth : n % kTile;
    const int k = kAlongDepth ? n % kDepth : n / kTile;
    const int row = row_of(first + i);
    const bool is_inside = row < operand.count && first_depth + k < operand.depth;
    tile[i][k] = is_inside
                     ? operand.data[row * operand.stride + (first_depth + k) * operand.depth_stride]
                     : Element{};
  }
}

/// The sums of the tile at (row, column) of A B^T.
template <bool kAAlongDepth, bool kBAlongDepth, typename Element>
__device__ TileSums multiply_tile(StepTiles<Element>& tiles, const Operand<Element>& a,
                                  const Operand<Element>& b, int row, int column,
                                  const ColumnOrder& order) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  TileSums sums;
  for (int depth = 0; depth < a.depth; depth += kDepth) {
    __syncthreads();  // the previous step has been read
    load_step<kAAlongDepth>(tiles.a, a, row, depth, [](int i) { return i; });
    load_step<kBAlongDepth>(tiles.b, b, column, depth, [&](int i) { return order.row_of(i); });
    __syncthreads();
    add_step(sums, tiles, warp, lane);
  }
  return sums;
}

/// Calls use(row, column, value) for each of a thread's sums, in tile coordinates.
template <typename Use>
__device__ void for_each_sum(const TileSums& sums, const Use& use) {
  const int g = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) use(g + i / 2 * 8, 8 * j + 2 * t + i % 2, sums.values[j][i]);
  }
}

/// Tiles of the rows of segments, numbered over all experts.
struct SegmentTiles {
  const int64_t* starts;
  const int64_t* counts;
  int num_experts;
  int column_tiles;
  int expert = 0;      // found by the last call
  int64_t before = 0;  // tiles of the experts before it

  /// Finds tile `number`, not less than in earlier calls. False: there is none.
  __device__ bool find(int64_t number) {
    for (; expert < num_experts; ++expert) {
      const int64_t tiles = (counts[expert] + kTile - 1) / kTile * column_tiles;
      if (number < before + tiles) return true;
      before += tiles;
    }
    return false;
  }
};

/// Forward and dX. Forward: B is w[e] by rows; dX: w[e] by columns.
template <typename Element, typename Result>
struct RowProductParams {
  const int64_t* starts;
  const int64_t* counts;
  int num_experts;
  const Element* rows;  // [R, inner]
  const Element* w;     // [E_local, N, K]
  int N;
  int K;
  const Element* bias;  // [E_local, N], or null
  Result* out;
  Element* hidden;  // [R, N], or null
  bool interleaved;
  UnusedRows unused;  // of `out`
};

/// Stores a tile of a plain product, plus the bias.
template <typename Element, typename Result>
__device__ void store_rows(const TileSums& sums, const RowProductParams<Element, Result>& params,
                           int64_t expert, int64_t row, int num_rows, int column, int out_columns) {
  const Element* const bias = params.bias != nullptr ? params.bias + expert * params.N : nullptr;
  for_each_sum(sums, [&](int r, int c, float sum) {
    if (r >= num_rows || column + c >= out_columns) return;
    const float value = bias != nullptr ? sum + to_float(bias[column + c]) : sum;
    params.out[(row + r) * out_columns + column + c] = from_float<Result>(value);
  });
}

/// Stores a tile of a gated product: half as many columns.
template <typename Element, typename Result>
__device__ void store_gated(const TileSums& sums, const RowProductParams<Element, Result>& params,
                            int64_t expert, int64_t row, int num_rows, int column) {
  const int F = params.N / 2;
  const ColumnOrder order{true, params.interleaved, params.N};
  const int g = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const auto rounded = [&](int w_row, int64_t r, float sum) {
    const float bias =
        params.bias != nullptr ? to_float(params.bias[expert * params.N + w_row]) : 0.0f;
    const Element value = from_float<Element>(params.bias != nullptr ? sum + bias : sum);
    if (params.hidden != nullptr) params.hidden[r * params.N + w_row] = value;
    return to_float(value);
  };
#pragma unroll
  for (int j = 0; j < kTile / 8; j += 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = g + i / 2 * 8;
      const int c = column + 8 * j + 2 * t + i % 2;
      const int gate_row = order.row_of(c);
      if (r >= num_rows || gate_row >= params.N) continue;
      const float gate = rounded(gate_row, row + r, sums.values[j][i]);
      const float linear = rounded(order.row_of(c + 8), row + r, sums.values[j + 1][i]);
      const int feature = c / 16 * 8 + c % 8;
      params.out[(row + r) * F + feature] =
          from_float<Result>(gate / (1.0f + expf(-gate)) * linear);
    }
  }
}

// A block takes tiles of 64 rows and 64 columns in turn; a warp has 16 of the rows.
template <typename Element, typename Result, bool kIsForward, bool kIsGated>
__global__ void __launch_bounds__(kThreads)
    row_product_kernel(const __grid_constant__ RowProductParams<Element, Result> params) {
  __shared__ StepTiles<Element> tiles;
  zero_unused_rows<Result>(params.unused, {.index = static_cast<int>(blockIdx.x),
                                           .num_workers = static_cast<int>(gridDim.x),
                                           .thread = static_cast<int>(threadIdx.x),
                                           .num_threads = kThreads});
  const int inner = kIsForward ? params.K : params.N;
  const int out_columns = kIsForward ? params.N : params.K;
  // In tile coordinates; the last group of 16 may be half full.
  const int tile_columns = kIsGated ? (params.N / 2 + 7) / 8 * 16 : out_columns;
  const ColumnOrder order{kIsGated, params.interleaved, params.N};
  SegmentTiles segments{params.starts, params.counts, params.num_experts,
                        (tile_columns + kTile - 1) / kTile};
  for (int64_t number = blockIdx.x; segments.find(number); number += gridDim.x) {
    const int64_t e = segments.expert;
    const int64_t start = params.starts[e];
    const auto count = static_cast<int>(params.counts[e]);
    const int64_t place = number - segments.before;
    const int row = static_cast<int>(place / segments.column_tiles) * kTile;
    const int column = static_cast<int>(place % segments.column_tiles) * kTile;
    const Element* const w = params.w + e * params.N * params.K;
    const Operand<Element> a{params.rows + start * inner, inner, 1, count, inner};
    const Operand<Element> b = kIsForward ? Operand<Element>{w, params.K, 1, params.N, params.K}
                                          : Operand<Element>{w, 1, params.K, params.K, params.N};
    const TileSums sums = multiply_tile<true, kIsForward>(tiles, a, b, row, column, order);
    if constexpr (kIsGated) {
      store_gated(sums, params, e, start + row, count - row, column);
    } else {
      store_rows(sums, params, e, start + row, count - row, column, out_columns);
    }
  }
}

template <typename Element, typename Result>
struct DwParams {
  const int64_t* starts;
  const int64_t* counts;
  int num_experts;
  const Element* grad;  // [R, N]
  const Element* x;     // [R, K]
  int N;
  int K;
  Result* out;      // [E_local, N, K]
  bool accumulate;  // Result is float
};

// A block takes tiles of 64 x 64 weights in turn, expert by expert; a warp has 16 of the rows.
template <typename Element, typename Result>
__global__ void __launch_bounds__(kThreads)
    dw_kernel(const __grid_constant__ DwParams<Element, Result> params) {
  __shared__ StepTiles<Element> tiles;
  const int column_tiles = (params.K + kTile - 1) / kTile;
  const int64_t tiles_per_expert = int64_t{column_tiles} * ((params.N + kTile - 1) / kTile);
  const ColumnOrder order{false, false, params.K};
  for (int64_t n = blockIdx.x; n < tiles_per_expert * params.num_experts; n += gridDim.x) {
    const int64_t e = n / tiles_per_expert;
    const int row = static_cast<int>(n % tiles_per_expert / column_tiles) * kTile;
    const int column = static_cast<int>(n % tiles_per_expert % column_tiles) * kTile;
    const int64_t start = params.starts[e];
    const auto count = static_cast<int>(params.counts[e]);
    if (params.accumulate && count == 0) continue;
    const Operand<Element> a{params.grad + start * params.N, 1, params.N, params.N, count};
    const Operand<Element> b{params.x + start * params.K, 1, params.K, params.K, count};
    const TileSums sums = multiply_tile<false, false>(tiles, a, b, row, column, order);
    Result* const out = params.out + e * params.N * params.K;
    for_each_sum(sums, [&](int r, int c, float sum) {
      if (row + r >= params.N || column + c >= params.K) return;
      Result& to = out[int64_t{row + r} * params.K + column + c];
      to = from_float<Result>(params.accumulate ? to_float(to) + sum : sum);
    });
  }
}

namespace {

constexpr int kBlocksPerSm = 8;

template <typename Element>
void load_all() {
  cuda::load_kernels(row_product_kernel<Element, Element, true, false>,
                     row_product_kernel<Element, Element, true, true>,
                     row_product_kernel<Element, Element, false, false>,
                     row_product_kernel<Element, float, true, false>,
                     row_product_kernel<Element, float, false, false>, dw_kernel<Element, Element>,
                     dw_kernel<Element, float>);
}

// Calls work with values of the types of rows and of results, for template arguments.
template <typename Work>
void with_types(DType dtype, DType result, const Work& work) {
  const auto with_result = [&]<typename Element>(Element element) {
    if (result == DType::kF32) {
      work(element, float{});
    } else {
      work(element, element);
    }
  };
  if (dtype == DType::kBF16) {
    with_result(BF16{});
  } else if (dtype == DType::kF16) {
    with_result(F16{});
  } else {
    with_result(float{});
  }
}

template <typename Element, typename Result, bool kIsForward, bool kIsGated>
void launch_rows(const RowProductParams<Element, Result>& params, int num_sms,
                 cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(num_sms * kBlocksPerSm);
  row_product_kernel<Element, Result, kIsForward, kIsGated>
      <<<blocks, kThreads, 0, stream>>>(params);
  CROSSDOCK_CUDA(cudaGetLastError());
}

UnusedRows unused_rows(const Segments& segments, const TensorView& out, bool is_zeroed) {
  return {.starts = segments.starts,
          .counts = segments.counts,
          .num_experts = static_cast<int>(segments.num_segments),
          .R = out.num_rows(),
          .rows = is_zeroed ? static_cast<std::byte*>(out.data) : nullptr,
          .row_bytes = out.row_bytes()};
}

template <typename Element, typename Result>
RowProductParams<Element, Result> row_params(const ConstTensorView& rows, const ConstTensorView& w,
                                             const Segments& segments, const TensorView& out,
                                             const ProductSizes& sizes) {
  RowProductParams<Element, Result> params{};
  params.starts = segments.starts;
  params.counts = segments.counts;
  params.num_experts = static_cast<int>(sizes.E_local);
  params.rows = pointer<Element>(rows);
  params.w = pointer<Element>(w);
  params.N = static_cast<int>(sizes.N);
  params.K = static_cast<int>(sizes.K);
  params.out = pointer<Result>(out);
  return params;
}

}  // namespace

void load_products() {
  load_all<BF16>();
  load_all<F16>();
  load_all<float>();
}

void launch_product(const ProductForwardArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream) {
  with_types(args.x.dtype, args.out.dtype, [&]<typename Element, typename Result>(Element, Result) {
    auto params = row_params<Element, Result>(args.x, args.w, args.segments, args.out, sizes);
    params.bias = pointer<Element>(args.bias);
    params.hidden = pointer<Element>(args.hidden);
    params.interleaved = args.interleaved;
    params.unused = unused_rows(args.segments, args.out, args.zero_unused_rows);
    if (args.epilogue == ProductEpilogue::kNone) {
      launch_rows<Element, Result, true, false>(params, num_sms, stream);
    } else if constexpr (std::is_same_v<Element, Result>) {  // checked
      launch_rows<Element, Result, true, true>(params, num_sms, stream);
    }
  });
}

void launch_product(const ProductDxArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream) {
  with_types(args.grad.dtype, args.out.dtype,
             [&]<typename Element, typename Result>(Element, Result) {
               auto params =
                   row_params<Element, Result>(args.grad, args.w, args.segments, args.out, sizes);
               params.unused = unused_rows(args.segments, args.out, args.zero_unused_rows);
               launch_rows<Element, Result, false, false>(params, num_sms, stream);
             });
}

void launch_product(const ProductDwArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream) {
  const int64_t tiles = (sizes.N + kTile - 1) / kTile * ((sizes.K + kTile - 1) / kTile);
  const auto blocks =
      static_cast<unsigned>(std::min(tiles * sizes.E_local, int64_t{num_sms} * kBlocksPerSm));
  with_types(
      args.grad.dtype, args.out.dtype, [&]<typename Element, typename Result>(Element, Result) {
        const DwParams<Element, Result> params{.starts = args.segments.starts,
                                               .counts = args.segments.counts,
                                               .num_experts = static_cast<int>(sizes.E_local),
                                               .grad = pointer<Element>(args.grad),
                                               .x = pointer<Element>(args.x),
                                               .N = static_cast<int>(sizes.N),
                                               .K = static_cast<int>(sizes.K),
                                               .out = pointer<Result>(args.out),
                                               .accumulate = args.accumulate};
        dw_kernel<Element, Result><<<blocks, kThreads, 0, stream>>>(params);
        CROSSDOCK_CUDA(cudaGetLastError());
      });
}

}  // namespace crossdock::ops::plain
