#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "crossdock/thread_pool.hpp"
#include "ops/gemm.hpp"

namespace crossdock::ops {

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
