#include "dispatch/dispatch_args.hpp"

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

// Runs in every call: with concat, building the text would take longer than using it.
std::string call_text(const DispatchArgs& args) {
  std::string text = "dtype=";
  text += name_of(args.x.dtype);
  text += ";scales=";
  text += args.scales.given() ? name_of(args.scales.dtype) : "none";
  text += args.with_row_weights ? ";row_weights=1" : ";row_weights=0";
  text += ";num_chunks=";
  text += std::to_string(args.num_chunks);
  text += args.on_chunk ? ";on_chunk=1" : ";on_chunk=0";
  return text;
}

void check_outputs(const DispatchArgs& args) {
  check_no_overlap(
      {{"rows", args.rows}, {"row_scales", args.row_scales}, {"row_weights", args.row_weights}},
      {{"x", args.x}, {"scales", args.scales}});
}

void check_outputs(const GatherSumArgs& args) {
  check_no_overlap({{"out", args.out}}, {{"rows", args.rows}, {"weights", args.weights}});
}

void check_outputs(const CombineBackwardArgs& args) {
  check_no_overlap({{"grad_rows", args.grad_rows}, {"grad_weights", args.grad_weights}},
                   {{"grad_out", args.grad_out}, {"y", args.y}});
}

void check_collected(const ConstTensorView& rows, const TensorView& routes) {
  check_no_overlap({{"routes", routes}}, {{"rows", rows}});
}

std::optional<Shape> check_args(const DispatchArgs& args, int64_t T, int64_t D) {
  check_outputs(args);
  CROSSDOCK_CHECK(args.num_chunks >= 1, "num_chunks must be at least 1, got ", args.num_chunks);
  CROSSDOCK_CHECK(args.with_row_weights || !args.row_weights.given(),
                  "row_weights needs with_row_weights");
  if (!args.scales.given()) {
    CROSSDOCK_CHECK(!args.row_scales.given(), "row_scales needs scales");
    return std::nullopt;
  }
  CROSSDOCK_CHECK(args.x.dtype == DType::kF8E4M3, "scales are for fp8_e4m3 tokens only, but x is ",
                  name_of(args.x.dtype));
  const int64_t group = fp8_group_size(args.scales.dtype);
  return Shape{T, (D + group - 1) / group};
}

}  // namespace crossdock
