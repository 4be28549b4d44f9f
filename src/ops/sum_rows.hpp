#pragma once

#include <cstddef>
#include <cstdint>

#include "crossdock/dtype.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::ops {

/// out[n] = round(acc), where acc starts at +0 and becomes fma(weight, row, acc) for the rows of n
/// in the order given. acc is fp32, or fp64 for fp64 rows; one rounding at the end. Same bits on
/// every machine.
struct SumRowsArgs {
  const std::byte* const* rows = nullptr;  // address of each row of D values; null: no row
  const int64_t* offsets = nullptr;  // [N + 1]: rows offsets[n] to offsets[n + 1] belong to n;
  int64_t K = 0;                     // without offsets: rows n * K to n * K + K
  const void* weights = nullptr;     // one per row, in the type of acc; null: all 1
  std::byte* out = nullptr;          // [N, D]
  int64_t N = 0;
  int64_t D = 0;
  DType row_dtype = DType::kF32;  // fp64, fp32, bf16 or fp16
  DType out_dtype = DType::kF32;  // row_dtype; or one of them is fp32, the other bf16 or fp16
};
void sum_rows(const SumRowsArgs& args, ThreadPool& pool);

/// Backward of the weighted sum, at the rows: grad[r] holds grad_out of the row's token and becomes
/// round(weight[r] * grad[r]); grad_weights[r] = <y[r], grad[r]> (of the old grad), summed in a
/// fixed order in fp32, or fp64 for fp64 rows.
struct SumRowsBackwardArgs {
  const std::byte* y = nullptr;   // [R, D]
  std::byte* grad = nullptr;      // [R, D], replaced
  const void* weights = nullptr;  // [R] in the type of the sums
  void* grad_weights = nullptr;   // [R] in the same type
  int64_t R = 0;
  int64_t D = 0;
  DType dtype = DType::kF32;  // of y and grad: fp64, fp32, bf16 or fp16
};
void sum_rows_backward(const SumRowsBackwardArgs& args, ThreadPool& pool);

/// sum[i] = round(sum[i] + term[i]), added in fp32 (fp64 for fp64).
struct AddArgs {
  ConstTensorView term;  // same dtype and shape as sum
  TensorView sum;        // fp64, fp32, bf16 or fp16
};

void add(const AddArgs& args, ThreadPool& pool);

}  // namespace crossdock::ops
