#include "ops/gemm.hpp"

#include <algorithm>
#include <memory>
#include <vector>

namespace crossdock::ops {
namespace {

std::vector<GemmKernel> find_kernels() {
  std::vector<GemmKernel> kernels;
#if CROSSDOCK_HAS_X86_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) kernels.push_back({"avx512", gemm_avx512, gemm_avx512});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kernels.push_back({"avx2", gemm_avx2, gemm_avx2});
  }
#endif
  kernels.push_back({"portable", gemm_portable, gemm_portable});
  return kernels;
}

// About half a megabyte (fp32) for every thread that multiplies, kept until the thread ends.
template <typename T>
GemmScratch<T>& thread_scratch() {
  static thread_local const auto kScratch = std::make_unique_for_overwrite<GemmScratch<T>>();
  return *kScratch;
}

}  // namespace

const std::vector<GemmKernel>& gemm_kernels() {
  static const std::vector<GemmKernel> kKernels = find_kernels();
  return kKernels;
}

void gemm(const GemmArgs<float>& args) {
  gemm_kernels().front().run_f32(args, thread_scratch<float>());
}

void gemm(const GemmArgs<double>& args) {
  gemm_kernels().front().run_f64(args, thread_scratch<double>());
}

namespace {

// Parts of one problem, as even as possible.
struct Cut {
  int64_t rows = 0;     // of a part, except the last
  int64_t columns = 0;  // the same; a multiple of kGemmColumnMultiple
  int64_t num_row_parts = 0;
  int64_t num_parts = 0;
};

constexpr int64_t divide_up(int64_t n, int64_t by) {
  return (n + by - 1) / by;
}
constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return divide_up(n, multiple) * multiple;
}

Cut cut(const GemmProblem& problem, int64_t max_columns) {
  if (problem.M == 0 || problem.N == 0) return {};
  Cut result;
  result.rows = divide_up(problem.M, divide_up(problem.M, kGemmTileRows));
  result.columns =
      round_up(divide_up(problem.N, divide_up(problem.N, max_columns)), kGemmColumnMultiple);
  result.num_row_parts = divide_up(problem.M, result.rows);
  result.num_parts = result.num_row_parts * divide_up(problem.N, result.columns);
  return result;
}

// Full tiles, or narrower ones if there would be too few to keep all threads busy to the end.
std::vector<Cut> cut_all(std::span<const GemmProblem> problems, int num_threads) {
  std::vector<Cut> cuts(problems.size());
  for (int64_t columns = kGemmTileColumns;; columns /= 2) {
    int64_t num_parts = 0;
    for (size_t i = 0; i < problems.size(); ++i) {
      cuts[i] = cut(problems[i], columns);
      num_parts += cuts[i].num_parts;
    }
    if (num_parts >= int64_t{4} * num_threads || num_threads == 1 ||
        columns <= 2 * kGemmColumnMultiple) {
      return cuts;
    }
  }
}

template <typename T>
T* thread_tile() {
  struct alignas(64) Tile {
    T values[kGemmTileRows * kGemmTileColumns];
  };
  static thread_local const auto kTile = std::make_unique_for_overwrite<Tile>();
  return kTile->values;
}

}  // namespace

template <typename T>
void grouped_gemm(std::span<const GemmProblem> problems, ThreadPool& pool,
                  const std::function<void(const GemmTile<T>&)>& take) {
  const std::vector<Cut> cuts = cut_all(problems, pool.num_threads());
  std::vector<int64_t> part_offsets(problems.size() + 1, 0);
  for (size_t i = 0; i < cuts.size(); ++i)
    part_offsets[i + 1] = part_offsets[i] + cuts[i].num_parts;

  pool.parallel_for(part_offsets.back(), [&](int64_t part) {
    const auto above = std::upper_bound(part_offsets.begin(), part_offsets.end(), part);
    const int64_t index = above - part_offsets.begin() - 1;
    const GemmProblem& problem = problems[static_cast<size_t>(index)];
    const Cut& size = cuts[static_cast<size_t>(index)];
    const int64_t place = part - part_offsets[static_cast<size_t>(index)];
    GemmTile<T> tile;
    tile.problem = index;
    tile.row = place % size.num_row_parts * size.rows;
    tile.column = place / size.num_row_parts * size.columns;
    tile.num_rows = std::min(size.rows, problem.M - tile.row);
    tile.num_columns = std::min(size.columns, problem.N - tile.column);
    tile.stride = round_up(tile.num_columns, kGemmColumnMultiple);
    T* values = thread_tile<T>();
    tile.values = values;
    gemm(GemmArgs<T>{.a = problem.a.from_row(tile.row),
                     .b = problem.b.from_row(tile.column),
                     .c = values,
                     .c_stride = tile.stride,
                     .M = tile.num_rows,
                     .N = tile.num_columns,
                     .K = problem.K});
    take(tile);
  });
}

template void grouped_gemm<float>(std::span<const GemmProblem>, ThreadPool&,
                                  const std::function<void(const GemmTile<float>&)>&);
template void grouped_gemm<double>(std::span<const GemmProblem>, ThreadPool&,
                                   const std::function<void(const GemmTile<double>&)>&);

}  // namespace crossdock::ops
