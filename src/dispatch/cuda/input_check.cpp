#include "dispatch/cuda/input_check.hpp"

#include "core/check.hpp"
#include "dispatch/dispatch_args.hpp"

namespace crossdock::cuda {

void check_tokens(const CudaRank& rank, const DispatchArgs& args, int64_t T) {
  const int64_t D = rank.config().width;
  rank.check_tensor("x", args.x, {T, D});
  CROSSDOCK_CHECK(
      (is_summable(args.x.dtype) && args.x.dtype != DType::kF64) || args.x.dtype == DType::kF8E4M3,
      "x on a GPU must be fp32, bf16, fp16 or fp8_e4m3, got ", name_of(args.x.dtype));
  if (const auto scales_shape = check_args(args, T, D)) {
    rank.check_tensor("scales", args.scales, *scales_shape);
  }
}

void check_rows_dtype(const char* name, const ConstTensorView& rows) {
  CROSSDOCK_CHECK(is_summable(rows.dtype) && rows.dtype != DType::kF64, name,
                  " on a GPU must be fp32, bf16 or fp16, got ", name_of(rows.dtype));
}

void check_gradients(const CudaRank& rank, const Plan& plan, const ConstTensorView& grad_out,
                     const ConstTensorView& y) {
  const int64_t D = rank.config().width;
  rank.check_tensor("grad_out", grad_out, {plan.num_tokens(), D});
  rank.check_tensor("y", y, {plan.capacity_rows(), D});
  check_rows_dtype("grad_out", grad_out);
  CROSSDOCK_CHECK(y.dtype == grad_out.dtype, "y and grad_out must have one dtype, got ",
                  name_of(y.dtype), " and ", name_of(grad_out.dtype));
}

}  // namespace crossdock::cuda
