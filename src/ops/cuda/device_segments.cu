#include <algorithm>
#include <type_traits>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "ops/cuda/device_rows.hpp"
#include "ops/cuda/row_chunks.cuh"

namespace crossdock::ops {
namespace {

// At most as many blocks as run at once; they take work in turn.
unsigned num_blocks(int64_t wanted, int blocks_per_sm) {
  const int64_t most = int64_t{cuda::num_sms(cuda::current_device())} * blocks_per_sm;
  return static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, most));
}

constexpr int kZeroThreads = 256;
constexpr int kZeroBlocksPerSm = 4;

struct ZeroArgs {
  struct Rows {
    std::byte* data;
    int64_t row_bytes;
  };
  SegmentTable segments;
  Rows tensors[2];
  int64_t R;
};

// Every `step`-th word of rows [begin, end), from word `first` on.
template <typename Word>
__device__ void zero_words(const ZeroArgs::Rows& rows, int64_t begin, int64_t end, int64_t first,
                           int64_t step) {
  const int64_t words_per_row = rows.row_bytes / static_cast<int64_t>(sizeof(Word));
  Word* words = reinterpret_cast<Word*>(rows.data) + begin * words_per_row;
  for (int64_t i = first; i < (end - begin) * words_per_row; i += step) words[i] = Word{};
}

__device__ void zero_rows(const ZeroArgs& args, int64_t begin, int64_t end, int64_t first,
                          int64_t step) {
  for (const ZeroArgs::Rows& rows : args.tensors) {
    const uint64_t bits =
        reinterpret_cast<uint64_t>(rows.data) | static_cast<uint64_t>(rows.row_bytes);
    if (bits % sizeof(uint4) == 0) {
      zero_words<uint4>(rows, begin, end, first, step);
    } else {
      zero_words<uint16_t>(rows, begin, end, first, step);
    }
  }
}

// A block takes gaps before and between segments in turn; all blocks share the rows past the last
// segment; a thread stores single words. Floor: the bytes of the unused rows.
__global__ void __launch_bounds__(kZeroThreads)
    zero_unused_rows_kernel(const __grid_constant__ ZeroArgs args) {
  cuda::wait_for_previous_kernel();
  const auto end_of = [&](int64_t e) { return args.segments.starts[e] + args.segments.counts[e]; };
  const int64_t num = args.segments.num;
  for (int64_t e = blockIdx.x; e < num; e += gridDim.x) {
    const int64_t before = e > 0 ? end_of(e - 1) : 0;
    zero_rows(args, before, args.segments.starts[e], threadIdx.x, kZeroThreads);
  }
  const int64_t used = num > 0 ? end_of(num - 1) : 0;
  zero_rows(args, used, args.R, int64_t{blockIdx.x} * kZeroThreads + threadIdx.x,
            int64_t{gridDim.x} * kZeroThreads);
}

constexpr int kAddWarps = 8;
constexpr int kAddBlocksPerSm = 4;

template <typename Element, typename Result>
struct AddArgs {
  SegmentTable segments;
  const Element* bias;
  const float* row_weights;
  Result* rows;
  int64_t D;
};

// A warp takes rows in turn, a lane single values.
// Floor: 2 D * sizeof(Result) bytes for each row of a segment.
template <typename Element, typename Result>
__global__ void __launch_bounds__(kAddWarps * 32)
    add_weighted_bias_kernel(const __grid_constant__ AddArgs<Element, Result> args) {
  cuda::wait_for_previous_kernel();
  const int64_t end = args.segments.end_row();
  const int64_t step = int64_t{gridDim.x} * kAddWarps;
  int64_t row = args.segments.first_row() + int64_t{blockIdx.x} * kAddWarps + threadIdx.x / 32;
  for (; row < end; row += step) {
    const int64_t expert = args.segments.find(row);
    if (expert < 0) continue;
    const float weight = args.row_weights[row];
    const Element* bias = args.bias + expert * args.D;
    Result* values = args.rows + row * args.D;
#pragma unroll 4
    for (int64_t d = threadIdx.x % 32; d < args.D; d += 32) {
      values[d] = cuda::narrow<Result>(cuda::widen(values[d]) + weight * cuda::widen(bias[d]));
    }
  }
}

template <typename Element, typename Result>
void launch_add(const AddWeightedBiasArgs& args, cudaStream_t stream) {
  const AddArgs<Element, Result> kernel_args{.segments = SegmentTable(args.segments),
                                             .bias = pointer<Element>(args.bias),
                                             .row_weights = pointer<float>(args.row_weights),
                                             .rows = pointer<Result>(args.rows),
                                             .D = args.rows.shape[1]};
  const unsigned blocks =
      num_blocks((args.rows.num_rows() + kAddWarps - 1) / kAddWarps, kAddBlocksPerSm);
  cuda::launch_early(add_weighted_bias_kernel<Element, Result>, blocks, kAddWarps * 32, stream,
                     kernel_args);
}

constexpr int kSumWarps = 8;
constexpr int kSumBlocksPerSm = 3;
constexpr int kSumUnroll = 4;   // rows whose loads a thread has in flight
constexpr int kChunkLanes = 8;  // adjacent lanes of a warp in a row
constexpr int kRowsAtOnce = kSumWarps * 32 / kChunkLanes;

template <typename Element>
inline constexpr int kSumColumns = kChunkLanes* cuda::kWide<Element>;  // 128 bytes of a row

template <typename Element>
struct SumArgs {
  SegmentTable segments;
  const Element* rows;
  const float* row_weights;  // may be null
  float* sums;
  int64_t width;
  bool accumulate;
};

// sums[j] = the sum over rows i = first, first + kRowsAtOnce, ... of a segment, ascending.
template <bool kAligned, typename Element>
__device__ void sum_rows(const SumArgs<Element>& args, int64_t start, int64_t count, int64_t first,
                         int64_t column, float (&sums)[cuda::kWide<Element>]) {
  for (int64_t i = first; i < count; i += kRowsAtOnce * kSumUnroll) {
    Chunk<Element> chunks[kSumUnroll];
    float weights[kSumUnroll];
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      const int64_t at = i + u * kRowsAtOnce;
      if (at >= count) continue;
      const int64_t row = start + at;
      chunks[u] = load_chunk_once<kAligned>(args.rows + row * args.width, column, args.width);
      weights[u] = args.row_weights != nullptr ? args.row_weights[row] : 1.0f;
    }
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      if (i + u * kRowsAtOnce >= count) continue;
#pragma unroll
      for (int j = 0; j < cuda::kWide<Element>; ++j) {
        sums[j] = fmaf(weights[u], cuda::widen(chunks[u].elements[j]), sums[j]);
      }
    }
  }
}

// A block takes a segment and kSumColumns of its columns at a time; a thread sums one chunk of
// every kRowsAtOnce-th row. Floor: width * sizeof(Element) bytes for each row of a segment.
template <typename Element, bool kAligned>
__global__ void __launch_bounds__(kSumWarps * 32, kSumBlocksPerSm)
    sum_segments_kernel(const __grid_constant__ SumArgs<Element> args) {
  constexpr int kCount = cuda::kWide<Element>;
  __shared__ float warp_sums[kSumWarps][kSumColumns<Element>];
  cuda::wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % kChunkLanes;
  const int64_t num_tiles = (args.width + kSumColumns<Element> - 1) / kSumColumns<Element>;
  for (int64_t task = blockIdx.x; task < args.segments.num * num_tiles; task += gridDim.x) {
    const int64_t e = task / num_tiles;
    const int64_t first_column = task % num_tiles * kSumColumns<Element>;
    const int64_t count = args.segments.counts[e];
    if (args.accumulate && count == 0) continue;
    float sums[kCount] = {};
    const int64_t column = first_column + chunk * kCount;
    if (column < args.width) {
      sum_rows<kAligned>(args, args.segments.starts[e], count, thread / kChunkLanes, column, sums);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {  // the rows of a warp
      for (int offset = 16; offset >= kChunkLanes; offset /= 2) {
        sums[j] += __shfl_xor_sync(~0u, sums[j], offset);
      }
      if (thread % 32 < kChunkLanes) warp_sums[thread / 32][chunk * kCount + j] = sums[j];
    }
    __syncthreads();
    if (thread < kSumColumns<Element> && first_column + thread < args.width) {
      float sum = 0.0f;
      for (int warp = 0; warp < kSumWarps; ++warp) sum += warp_sums[warp][thread];
      float* to = args.sums + e * args.width + first_column + thread;
      *to = args.accumulate ? *to + sum : sum;
    }
    __syncthreads();
  }
}

template <typename Element>
void launch_sum(const SumSegmentsArgs& args, cudaStream_t stream) {
  const SumArgs<Element> kernel_args{.segments = SegmentTable(args.segments),
                                     .rows = pointer<Element>(args.rows),
                                     .row_weights = pointer<float>(args.row_weights),
                                     .sums = pointer<float>(args.sums),
                                     .width = args.sums.shape[1],
                                     .accumulate = args.accumulate};
  const int64_t num_tiles = (kernel_args.width + kSumColumns<Element> - 1) / kSumColumns<Element>;
  auto* kernel = has_aligned_rows(args.rows) ? sum_segments_kernel<Element, true>
                                             : sum_segments_kernel<Element, false>;
  cuda::launch_early(kernel, num_blocks(args.segments.num_segments * num_tiles, kSumBlocksPerSm),
                     kSumWarps * 32, stream, kernel_args);
}

template <typename Element>
void load_for() {
  cuda::load_kernels(zero_unused_rows_kernel, add_weighted_bias_kernel<Element, Element>,
                     add_weighted_bias_kernel<Element, float>, sum_segments_kernel<Element, true>,
                     sum_segments_kernel<Element, false>);
}

}  // namespace

void load_device_segments(DType dtype, Device device) {
  const cuda::CallGuard guard(device.index);
  cuda::with_element(dtype, []<typename Element>(Element) { load_for<Element>(); });
}

void zero_unused_rows_on_device(const ZeroUnusedRowsArgs& args, Stream stream) {
  const TensorView& first = args.tensors[0];
  const TensorView& second = args.tensors[1];
  if (first.num_rows() == 0) return;
  const cuda::CallGuard guard(first.device.index);
  const ZeroArgs kernel_args{
      .segments = SegmentTable(args.segments),
      .tensors = {{pointer<std::byte>(first), first.row_bytes()},
                  {pointer<std::byte>(second), second.given() ? second.row_bytes() : 0}},
      .R = first.num_rows()};
  cuda::launch_early(zero_unused_rows_kernel, num_blocks(first.num_rows(), kZeroBlocksPerSm),
                     kZeroThreads, cuda::handle_of(stream), kernel_args);
}

void add_weighted_bias_on_device(const AddWeightedBiasArgs& args, Stream stream) {
  if (args.rows.num_rows() == 0 || args.segments.num_segments == 0) return;
  const cuda::CallGuard guard(args.rows.device.index);
  cuda::with_element(args.bias.dtype, [&]<typename Element>(Element) {
    if (args.rows.dtype == args.bias.dtype) {
      launch_add<Element, Element>(args, cuda::handle_of(stream));
    } else {
      launch_add<Element, float>(args, cuda::handle_of(stream));
    }
  });
}

void sum_segments_on_device(const SumSegmentsArgs& args, Stream stream) {
  if (args.segments.num_segments == 0) return;
  const cuda::CallGuard guard(args.sums.device.index);
  cuda::with_element(args.rows.dtype, [&]<typename Element>(Element) {
    launch_sum<Element>(args, cuda::handle_of(stream));
  });
}

}  // namespace crossdock::ops
