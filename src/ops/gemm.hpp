#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::ops {

/// A matrix operand: element (i, k) is data[i * row_stride + k * k_stride]. One of the two strides
/// is 1. `dtype` is the compute type, or bf16 / fp16 where the compute type is fp32.
struct GemmOperand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t row_stride = 0;
  int64_t k_stride = 1;

  /// The operand from row `row` on.
  GemmOperand from_row(int64_t row) const {
    const auto* bytes = static_cast<const std::byte*>(data);
    return {bytes + row * row_stride * size_of(dtype), dtype, row_stride, k_stride};
  }
};

/// c[i, j] = sum over k of a[i, k] * b[j, k], with T float or double.
///
/// The bits are the same on every machine: k runs in blocks of kGemmBlockK from 0; within a
/// block s = fma(a[i, k], b[j, k], s), k ascending from s = +0; the blocks' sums are added in
/// ascending order, starting with the first. So a row's result depends on that row alone, not on
/// the tile, its position, the instruction set or the number of threads. K = 0 gives +0.
template <typename T>
struct GemmArgs {
  GemmOperand a;   // [M, K]
  GemmOperand b;   // [N, K]
  T* c = nullptr;  // [M, c_stride], overwritten; columns from N to c_stride are left undefined
  int64_t c_stride = 0;  // at least N rounded up to kGemmColumnMultiple
  int64_t M = 0;
  int64_t N = 0;
  int64_t K = 0;
};

inline constexpr int64_t kGemmBlockK = 256;
inline constexpr int64_t kGemmColumnMultiple = 32;
/// Work is split into tiles of at most this many rows and columns: a tile and its packed operands
/// stay in a core's second-level cache.
inline constexpr int64_t kGemmTileRows = 256;
inline constexpr int64_t kGemmTileColumns = 256;

/// Runs this machine's fastest kernel on the calling thread.
void gemm(const GemmArgs<float>& args);
void gemm(const GemmArgs<double>& args);

// The kernels, one source file per instruction set; gemm.cpp chooses among them at run time. All
// give the same bits.

/// Packed operands of one tile.
template <typename T>
struct alignas(64) GemmScratch {
  T a[kGemmTileRows * kGemmBlockK];
  T b[kGemmTileColumns * kGemmBlockK];
  T panel[kGemmColumnMultiple * kGemmBlockK];  // of b, widened, not yet transposed
};

void gemm_avx512(const GemmArgs<float>& args, GemmScratch<float>& scratch);
void gemm_avx512(const GemmArgs<double>& args, GemmScratch<double>& scratch);
void gemm_avx2(const GemmArgs<float>& args, GemmScratch<float>& scratch);
void gemm_avx2(const GemmArgs<double>& args, GemmScratch<double>& scratch);
void gemm_portable(const GemmArgs<float>& args, GemmScratch<float>& scratch);
void gemm_portable(const GemmArgs<double>& args, GemmScratch<double>& scratch);

struct GemmKernel {
  std::string_view name;
  void (*run_f32)(const GemmArgs<float>& args, GemmScratch<float>& scratch) = nullptr;
  void (*run_f64)(const GemmArgs<double>& args, GemmScratch<double>& scratch) = nullptr;
};

/// The kernels this machine can run, fastest first; never empty.
const std::vector<GemmKernel>& gemm_kernels();

/// One product of a group: [M, K] times [N, K] transposed. Any of the three may be 0.
struct GemmProblem {
  GemmOperand a;
  GemmOperand b;
  int64_t M = 0;
  int64_t N = 0;
  int64_t K = 0;
};

/// A finished part of one product: rows [row, row + num_rows), columns [column, column +
/// num_columns); element (i, j) of the part is values[i * stride + j].
template <typename T>
struct GemmTile {
  int64_t problem = 0;
  int64_t row = 0;
  int64_t column = 0;
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  const T* values = nullptr;
  int64_t stride = 0;
};

/// Computes all problems on the pool and hands every part to `take`, on several threads at once and
/// in any order; the values are valid until `take` returns, and are as defined in gemm.hpp. A
/// problem with M or N = 0 has no parts; with K = 0 its parts are zero.
template <typename T>
void grouped_gemm(std::span<const GemmProblem> problems, ThreadPool& pool,
                  const std::function<void(const GemmTile<T>&)>& take);

extern template void grouped_gemm<float>(std::span<const GemmProblem>, ThreadPool&,
                                         const std::function<void(const GemmTile<float>&)>&);
extern template void grouped_gemm<double>(std::span<const GemmProblem>, ThreadPool&,
                                          const std::function<void(const GemmTile<double>&)>&);

}  // namespace crossdock::ops
