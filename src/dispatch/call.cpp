#include "dispatch/call.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/fp8.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {
namespace {

// For messages.
const char* place_of(Device device) {
  return device.is_cpu() ? "" : " on a GPU";
}

// fp64 is moved on the host only.
bool takes(Device device, DType dtype) {
  return device.is_cpu() || dtype != DType::kF64;
}

const char* wide_types(Device device) {
  return device.is_cpu() ? "fp64, " : "";
}

void check_summable(const char* name, const ConstTensorView& rows, Device device) {
  CROSSDOCK_CHECK(is_summable(rows.dtype) && takes(device, rows.dtype), name, place_of(device),
                  " must be ", wide_types(device), "fp32, bf16 or fp16, got ", name_of(rows.dtype));
}

// Weights must be fp64 with fp64 rows, and fp32 otherwise.
void check_weight_dtype(const Plan& plan, DType row_dtype) {
  const DType wanted = row_dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  CROSSDOCK_CHECK(plan.data().weight_dtype == wanted, "weights must be ", name_of(wanted),
                  " with rows of ", name_of(row_dtype), "; the plan was made with ",
                  name_of(plan.data().weight_dtype));
}

struct NamedOutput {
  const char* name;
  const TensorView& tensor;  // may be unset
};

void check_output(Device device, const NamedOutput& output, DType dtype, const Shape& shape) {
  if (!output.tensor.given()) return;
  if (device.is_cpu()) return check_tensor(output.name, output.tensor, dtype, shape);
  check_tensor_on(device, output.name, output.tensor, shape);
  CROSSDOCK_CHECK(output.tensor.dtype == dtype, output.name, " must be ", name_of(dtype), ", got ",
                  name_of(output.tensor.dtype));
}

void check_scales(const Plan& plan, const DispatchArgs& args, Device device) {
  if (!args.scales.given()) {
    CROSSDOCK_CHECK(!args.row_scales.given(), "row_scales needs scales");
    return;
  }
  CROSSDOCK_CHECK(args.x.dtype == DType::kF8E4M3, "scales are for fp8_e4m3 tokens only, but x is ",
                  name_of(args.x.dtype));
  const int64_t group = fp8_group_size(args.scales.dtype);
  const int64_t D = plan.data().config->width;
  check_tensor_on(device, "scales", args.scales, {plan.num_tokens(), (D + group - 1) / group});
}

}  // namespace

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

std::string call_text(const GatherSumArgs& args) {
  std::string text = call_text_of_routes(args.rows);
  text += args.weights.given() ? ";weighted=1" : ";weighted=0";
  return text;
}

std::string call_text(const CombineBackwardArgs& args) {
  return call_text_of_routes(args.grad_out);
}

std::string call_text_of_routes(const ConstTensorView& rows) {
  return std::string("dtype=").append(name_of(rows.dtype));
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

void check_outputs(const ConstTensorView& rows, const TensorView& routes) {
  check_no_overlap({{"routes", routes}}, {{"rows", rows}});
}

void check_device(Device device, const char* name, const ConstTensorView& tensor) {
  CROSSDOCK_CHECK(tensor.device == device, name, " must be ", describe(device),
                  ", as the first routing was; it is ", describe(tensor.device));
}

void check_tensor_on(Device device, const char* name, const ConstTensorView& tensor,
                     const Shape& shape) {
  if (device.is_cpu()) return check_tensor(name, tensor, shape);
  CROSSDOCK_CHECK(tensor.shape == shape, name, " must be ", shape.to_string(), ", got ",
                  describe(tensor));
  check_device(device, name, tensor);
  check_not_null(name, tensor);
}

void check_args(const Plan& plan, const DispatchArgs& args, Device device) {
  const DType dtype = args.x.dtype;
  const int64_t D = plan.data().config->width;
  const int64_t R = plan.capacity_rows();
  check_tensor_on(device, "x", args.x, {plan.num_tokens(), D});
  const bool is_known = is_summable(dtype) || dtype == DType::kF8E4M3;
  CROSSDOCK_CHECK(is_known && takes(device, dtype), "x", place_of(device), " must be ",
                  wide_types(device), "fp32, bf16, fp16 or fp8_e4m3, got ", name_of(dtype));
  check_outputs(args);
  CROSSDOCK_CHECK(args.num_chunks >= 1, "num_chunks must be at least 1, got ", args.num_chunks);
  CROSSDOCK_CHECK(args.with_row_weights || !args.row_weights.given(),
                  "row_weights needs with_row_weights");
  check_scales(plan, args, device);
  check_output(device, {"rows", args.rows}, dtype, {R, D});
  if (args.scales.given()) {
    check_output(device, {"row_scales", args.row_scales}, args.scales.dtype,
                 {R, args.scales.shape[1]});
  }
  check_output(device, {"row_weights", args.row_weights}, plan.data().weight_dtype, {R});
}

void check_args(const Plan& plan, const GatherSumArgs& args, Device device) {
  const int64_t D = plan.data().config->width;
  check_tensor_on(device, "rows", args.rows, {plan.capacity_rows(), D});
  check_summable("rows", args.rows, device);
  if (args.weights.given()) check_weight_dtype(plan, args.rows.dtype);
  check_outputs(args);
  check_output(device, {"out", args.out}, args.rows.dtype, {plan.num_tokens(), D});
}

void check_args(const Plan& plan, const CombineBackwardArgs& args, Device device) {
  const int64_t D = plan.data().config->width;
  const ConstTensorView& y = args.y;
  check_tensor_on(device, "grad_out", args.grad_out, {plan.num_tokens(), D});
  check_tensor_on(device, "y", y, {plan.capacity_rows(), D});
  check_summable("grad_out", args.grad_out, device);
  CROSSDOCK_CHECK(y.dtype == args.grad_out.dtype, "y and grad_out must have the same dtype, got ",
                  name_of(y.dtype), " and ", name_of(args.grad_out.dtype));
  check_weight_dtype(plan, y.dtype);
  check_outputs(args);
  check_output(device, {"grad_rows", args.grad_rows}, y.dtype, y.shape);
  check_output(device, {"grad_weights", args.grad_weights}, plan.data().weight_dtype,
               {plan.num_tokens(), plan.data().K});
}

void check_collected(const Plan& plan, const ConstTensorView& rows, const TensorView& routes,
                     Device device) {
  check_tensor_on(device, "rows", rows, {plan.capacity_rows()});
  const bool is_wide = rows.dtype == DType::kF64;
  CROSSDOCK_CHECK(rows.dtype == DType::kF32 || (is_wide && device.is_cpu()), "rows",
                  place_of(device), " must be ", device.is_cpu() ? "fp32 or fp64" : "fp32",
                  ", got ", name_of(rows.dtype));
  check_outputs(rows, routes);
  check_output(device, {"routes", routes}, rows.dtype, {plan.num_tokens(), plan.data().K});
}

void check_plan(const PathContext& context, const Plan& plan) {
  CROSSDOCK_CHECK(plan.valid(), "the plan is empty or closed; make one with Dispatcher::plan");
  CROSSDOCK_CHECK(plan.data().config == context.config,
                  "the plan was made by another dispatcher; use the one that made it");
}

HostCall::HostCall(const PathContext& context, CallTerms terms)
    : context_(context), terms_(std::move(terms)) {
  context_.group.check();
}

uint64_t HostCall::agree() {
  sequence_ = context_.group
                  .agree({.operation = terms_.operation,
                          .subject = terms_.subject_id(),
                          .config = std::move(terms_.text),
                          .refusal = as_refusal(refusal_)})
                  .sequence;
  return sequence_;
}

void agree_on_chunks(Group& group, const Plan& plan) {
  group.agree({.operation = "dispatch", .subject = plan.id()});
}

}  // namespace crossdock
