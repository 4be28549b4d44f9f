#include <algorithm>
#include <type_traits>

#include "core/cuda/launch.hpp"
#include "core/cuda/row_vector.cuh"
#include "dispatch/cuda/kernels/gather_sum.hpp"

namespace crossdock::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kPersistentBlocksPerSm = 4;  // with an SM limit
constexpr int kBatch = 4;                  // terms whose loads are in flight together
constexpr int kUnroll = 2;                 // vectors of each that a lane has in flight
constexpr int kPieceVectors = 128;         // of a row, for one warp

// A vector of a row, of either type, as it was loaded.
template <typename Row, typename Partial, int kCount>
struct LoadedVector {
  RowVector<Partial, kCount> bits;  // the larger type

  __device__ void load(const std::byte* row, int64_t at, bool is_partial) {
    if (std::is_same_v<Row, Partial> || is_partial) {
      bits = load_once(reinterpret_cast<const RowVector<Partial, kCount>*>(row) + at);
    } else {
      const auto value = load_once(reinterpret_cast<const RowVector<Row, kCount>*>(row) + at);
      __builtin_memcpy(&bits, &value, sizeof(value));
    }
  }

  __device__ float value(int i, bool is_partial) const {
    if (std::is_same_v<Row, Partial> || is_partial) return widen(bits.elements[i]);
    RowVector<Row, kCount> row;
    __builtin_memcpy(&row, &bits, sizeof(row));
    return widen(row.elements[i]);
  }
};

// The sums of up to kUnroll vectors, 32 apart.
template <typename Partial, int kCount>
struct Sums {
  float total[kUnroll][kCount] = {};
  float partial[kUnroll][kCount] = {};  // of the current group
  int32_t group = -1;

  __device__ void end_group() {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        total[u][j] = __fadd_rn(total[u][j], widen(narrow<Partial>(partial[u][j])));
        partial[u][j] = 0.0f;
      }
    }
  }
};

// Adds up to kBatch terms. Starts all loads before it uses the first.
template <typename Row, typename Partial, int kCount>
__device__ void add_terms(const SumGroupsArgs& args, int64_t begin, int64_t end, int64_t first,
                          int64_t last, Sums<Partial, kCount>& sums) {
  LoadedVector<Row, Partial, kCount> loaded[kBatch][kUnroll];
  SumTerm terms[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (begin + i >= end) continue;
    terms[i] = args.terms[begin + i];
    const bool is_partial = terms[i].source == args.partial_source;
    const int64_t row_bytes =
        args.D * static_cast<int64_t>(is_partial ? sizeof(Partial) : sizeof(Row));
    const std::byte* row = args.rows[terms[i].source] + terms[i].row * row_bytes;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * 32 < last) loaded[i][u].load(row, first + u * 32, is_partial);
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (begin + i >= end) continue;
    if (terms[i].group != sums.group) sums.end_group();
    sums.group = terms[i].group;
    const bool is_partial = terms[i].source == args.partial_source;
    const float weight = args.is_weighted ? terms[i].weight : 1.0f;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sums.partial[u][j] =
            __fmaf_rn(weight, loaded[i][u].value(j, is_partial), sums.partial[u][j]);
      }
    }
  }
}

// A warp takes pieces of sums in turn; a lane sums vectors of all rows of a sum.
template <typename Row, typename Partial, typename Out, int kCount>
__global__ void __launch_bounds__(kWarps * 32)
    sum_groups_kernel(const __grid_constant__ SumGroupsArgs args, int pieces) {
  wait_for_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row_vectors = args.D / kCount;
  const int64_t num_tasks = args.N * pieces;
  const bool has_rows = !is_poisoned(args.signals);
  for (int64_t task = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       task < num_tasks; task += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t n = task / pieces;
    const int64_t begin = (task - n * pieces) * kPieceVectors;
    const int64_t last = min(begin + kPieceVectors, row_vectors);
    const int64_t first_term = args.offsets[n];
    const int64_t last_term = has_rows ? args.offsets[n + 1] : first_term;
    auto* out = reinterpret_cast<RowVector<Out, kCount>*>(args.out) + n * row_vectors;
    for (int64_t first = begin + lane; first < last; first += 32 * kUnroll) {
      Sums<Partial, kCount> sums;
      for (int64_t term = first_term; term < last_term; term += kBatch) {
        add_terms<Row>(args, term, last_term, first, last, sums);
      }
      sums.end_group();
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * 32 >= last) continue;
        RowVector<Out, kCount> result;
#pragma unroll
        for (int j = 0; j < kCount; ++j) result.elements[j] = narrow<Out>(sums.total[u][j]);
        out[first + u * 32] = result;  // may stay in the cache: it is sent or read next
      }
    }
  }
  if (args.signals.P > 0 && last_block(args.signals, /*writes_to_peers=*/false)) {
    peer_barrier(args.signals, args.operation);
  }
}

template <typename Row, typename Partial, typename Out, int kCount>
void launch(const SumGroupsArgs& args, int sms, cudaStream_t stream) {
  const int64_t row_vectors = args.D / kCount;
  const int64_t pieces = std::max<int64_t>((row_vectors + kPieceVectors - 1) / kPieceVectors, 1);
  const int64_t wanted_blocks = std::max<int64_t>((args.N * pieces + kWarps - 1) / kWarps, 1);
  const int64_t most_blocks = sms > 0 ? int64_t{sms} * kPersistentBlocksPerSm : int64_t{1} << 30;
  const auto blocks = static_cast<unsigned>(std::min(wanted_blocks, most_blocks));
  launch_early(sum_groups_kernel<Row, Partial, Out, kCount>, blocks, kWarps * 32, stream, args,
               static_cast<int>(pieces));
}

template <typename Row, typename Partial, typename Out>
void launch_for_width(const SumGroupsArgs& args, int sms, cudaStream_t stream) {
  uint64_t addresses = reinterpret_cast<uint64_t>(args.out);
  for (const std::byte* rows : args.rows) addresses |= reinterpret_cast<uint64_t>(rows);
  if (addresses % 16 == 0 && args.D % kWide<Partial> == 0) {
    launch<Row, Partial, Out, kWide<Partial>>(args, sms, stream);
  } else {
    launch<Row, Partial, Out, 1>(args, sms, stream);
  }
}

template <typename Row, typename Partial, typename Out>
void load_for_width() {
  load_kernels(sum_groups_kernel<Row, Partial, Out, kWide<Partial>>,
               sum_groups_kernel<Row, Partial, Out, 1>);
}

template <typename Row>
void load_for() {
  load_for_width<Row, Row, Row>();
  if constexpr (!std::is_same_v<Row, float>) {
    load_for_width<Row, float, float>();
    load_for_width<Row, float, Row>();
  }
}

}  // namespace

void load_sum_groups() {
  load_for<float>();
  load_for<BF16>();
  load_for<F16>();
}

void launch_sum_groups(const SumGroupsArgs& args, int sms, cudaStream_t stream) {
  if (args.N == 0 && args.signals.P == 0) return;
  with_element(args.row_dtype, [&]<typename Row>(Row) {
    if (args.partial_dtype == args.row_dtype) {
      launch_for_width<Row, Row, Row>(args, sms, stream);
    } else if (args.out_dtype == DType::kF32) {
      launch_for_width<Row, float, float>(args, sms, stream);
    } else {
      launch_for_width<Row, float, Row>(args, sms, stream);
    }
  });
}

}  // namespace crossdock::cuda
