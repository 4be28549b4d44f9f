#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/row_vector.cuh"
#include "dispatch/cuda/kernels/link_rows.hpp"

namespace crossdock::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 2;
constexpr int kMostRowsPerTask = 8;
constexpr int kBatch = 4;   // rows of a token in flight
constexpr int kUnroll = 2;  // vectors of each that a lane has in flight

// Up to kBatch rows of one token; null past the last.
template <typename Vector>
struct LinkedRows {
  const Vector* rows[kBatch];
  float weights[kBatch];

  // Takes rows from `next` on, and advances `next` past them.
  __device__ LinkedRows(const PartialSumsArgs& args, int64_t row_vectors, int32_t& next) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      rows[i] = nullptr;
      weights[i] = 1.0f;
      if (next < 0) continue;
      const RowLink link = args.links.rows[next];
      rows[i] = reinterpret_cast<const Vector*>(args.rows) + next * row_vectors;
      if (args.is_weighted) weights[i] = link.weight;
      next = link.next();
    }
  }

  // sums += weight * row, row by row, for up to kUnroll vectors, 32 apart.
  template <int kCount>
  __device__ void add_to(float (&sums)[kUnroll][kCount], int64_t first, int64_t end) const {
    Vector values[kBatch][kUnroll];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (rows[i] == nullptr) continue;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * 32 < end) values[i][u] = load_once(rows[i] + first + u * 32);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (rows[i] == nullptr) continue;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          sums[u][j] = __fmaf_rn(weights[i], widen(values[i][u].elements[j]), sums[u][j]);
        }
      }
    }
  }
};

// A warp sums the rows of the token whose lowest slot here is in row `first_row`.
template <typename Element, typename Partial, int kCount>
__device__ void sum_token(const PartialSumsArgs& args, int64_t first_row) {
  using Vector = RowVector<Element, kCount>;
  const int64_t row_vectors = args.D / kCount;
  auto* out =
      reinterpret_cast<RowVector<Partial, kCount>*>(args.partials) + first_row * row_vectors;
  auto rest = static_cast<int32_t>(first_row);
  const LinkedRows<Vector> head(args, row_vectors, rest);
  for (int64_t first = threadIdx.x % 32; first < row_vectors; first += 32 * kUnroll) {
    float sums[kUnroll][kCount] = {};
    head.add_to(sums, first, row_vectors);
    for (int32_t next = rest; next >= 0;) {
      const LinkedRows<Vector> more(args, row_vectors, next);
      more.add_to(sums, first, row_vectors);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * 32 >= row_vectors) continue;
      RowVector<Partial, kCount> result;
#pragma unroll
      for (int j = 0; j < kCount; ++j) result.elements[j] = narrow<Partial>(sums[u][j]);
      out[first + u * 32] = result;
    }
  }
}

// A warp takes ranges of rows in turn. Each lane reads the link of one row; then the warp sums the
// tokens that begin in the range.
template <typename Element, typename Partial, int kCount>
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerSm)
    partial_sums_kernel(const __grid_constant__ PartialSumsArgs args, int rows_per_task) {
  wait_for_previous_kernel();
  if (is_poisoned(*args.signals)) return;
  const int64_t num_rows = min(*args.rows_in_use, args.links.num_rows);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first_task = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps * rows_per_task;
  for (int64_t begin = first_task * rows_per_task; begin < num_rows; begin += stride) {
    RowLink link{};
    if (lane < rows_per_task && begin + lane < num_rows) link = args.links.rows[begin + lane];
    uint32_t to_sum = __ballot_sync(~0u, link.is_first());
    while (to_sum != 0) {
      const int place = __ffs(static_cast<int>(to_sum)) - 1;
      to_sum &= to_sum - 1;
      sum_token<Element, Partial, kCount>(args, begin + place);
    }
  }
}

template <typename Element, typename Partial, int kCount>
void launch(const PartialSumsArgs& args, int sms, cudaStream_t stream) {
  const int64_t most_warps = int64_t{sms} * kBlocksPerSm * kWarps;
  const auto rows_per_task =
      static_cast<int>(std::clamp<int64_t>(args.links.num_rows / most_warps, 1, kMostRowsPerTask));
  const int64_t tasks = (args.links.num_rows + rows_per_task - 1) / rows_per_task;
  const int64_t blocks = std::min((tasks + kWarps - 1) / kWarps, int64_t{sms} * kBlocksPerSm);
  launch_early(partial_sums_kernel<Element, Partial, kCount>, static_cast<unsigned>(blocks),
               kWarps * 32, stream, args, rows_per_task);
}

template <typename Element, typename Partial>
void launch_for_width(const PartialSumsArgs& args, int sms, cudaStream_t stream) {
  const uint64_t bits = reinterpret_cast<uint64_t>(args.rows) |
                        reinterpret_cast<uint64_t>(args.partials) |
                        static_cast<uint64_t>(args.D) * sizeof(Element);
  if (bits % 16 == 0) {
    launch<Element, Partial, kWide<Element>>(args, sms, stream);
  } else {
    launch<Element, Partial, 1>(args, sms, stream);
  }
}

template <typename Element, typename Partial>
void load_for() {
  load_kernels(partial_sums_kernel<Element, Partial, kWide<Element>>,
               partial_sums_kernel<Element, Partial, 1>);
}

}  // namespace

void load_partial_sums() {
  load_for<float, float>();
  load_for<BF16, float>();
  load_for<BF16, BF16>();
  load_for<F16, float>();
  load_for<F16, F16>();
}

void launch_partial_sums(const PartialSumsArgs& args, int sms, cudaStream_t stream) {
  if (args.links.num_rows == 0) return;
  if (sms == 0) sms = num_sms(current_device());
  with_element(args.dtype, [&]<typename Element>(Element) {
    if (args.partial_dtype == args.dtype) {
      launch_for_width<Element, Element>(args, sms, stream);
    } else {
      launch_for_width<Element, float>(args, sms, stream);
    }
  });
}

}  // namespace crossdock::cuda
