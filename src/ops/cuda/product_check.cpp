#include <limits>
#include <string_view>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "ops/cuda/grouped_product.hpp"

namespace crossdock::ops {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

void check_product_dtype(DType dtype) {
  if (dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32) return;
  throw Error(ErrorCode::kUnsupported,
              concat("grouped products on a GPU take bf16, fp16 or fp32, got ", name_of(dtype),
                     dtype == DType::kF8E4M3 ? "; convert rows with dequantise_rows" : ""));
}

// Results may also be unrounded sums.
DType result_dtype(const TensorView& out, DType dtype) {
  return out.dtype == DType::kF32 ? DType::kF32 : dtype;
}

void check_sizes(const ProductSizes& sizes) {
  CROSSDOCK_CHECK(sizes.N >= 1 && sizes.N <= kMaxWidth && sizes.K >= 1 && sizes.K <= kMaxWidth,
                  "the widths of a product must be in [1, ", kMaxWidth, "], got ", sizes.N, " and ",
                  sizes.K);
  CROSSDOCK_CHECK(sizes.R <= kMaxRows, "a product takes at most ", kMaxRows, " rows, got ",
                  sizes.R);
  CROSSDOCK_CHECK(sizes.E_local * sizes.N <= kMaxRows, "local experts times ", sizes.N,
                  " must be at most ", kMaxRows, ", got ", sizes.E_local, " experts");
}

void check_device_segments(const Segments& segments, int64_t E_local, Device device) {
  CROSSDOCK_CHECK(segments.num_segments == E_local, "there must be ", E_local,
                  " segments, one for each local expert, got ", segments.num_segments);
  CROSSDOCK_CHECK(segments.device == device, "segments must be on GPU ", device.index);
  CROSSDOCK_CHECK(E_local == 0 || (segments.starts != nullptr && segments.counts != nullptr),
                  "segments must have starts and counts, got a null pointer");
}

int64_t dim_of(const ConstTensorView& tensor, int rank, int dim, std::string_view name) {
  CROSSDOCK_CHECK(tensor.shape.rank() == rank, name, " must have ", rank, " dimensions, got ",
                  describe(tensor));
  return tensor.shape[dim];
}

}  // namespace

ProductSizes check_product(const ProductForwardArgs& args, Device device) {
  const ProductSizes sizes{.R = dim_of(args.x, 2, 0, "x"),
                           .E_local = dim_of(args.w, 3, 0, "w"),
                           .N = dim_of(args.w, 3, 1, "w"),
                           .K = dim_of(args.w, 3, 2, "w")};
  const auto [R, E_local, N, K] = sizes;
  const DType dtype = args.w.dtype;
  const bool is_gated = args.epilogue != ProductEpilogue::kNone;
  check_product_dtype(dtype);
  check_sizes(sizes);
  CROSSDOCK_CHECK(!is_gated || N % 2 == 0, "SwiGLU needs an even number of rows in w, got ", N);
  CROSSDOCK_CHECK(is_gated || !args.interleaved, "interleaved rows need SwiGLU");
  check_tensor("x", args.x, device, dtype, Shape{R, K});
  check_tensor("w", args.w, device, dtype, Shape{E_local, N, K});
  if (args.bias.given()) check_tensor("bias", args.bias, device, dtype, Shape{E_local, N});
  check_tensor("out", args.out, device, is_gated ? dtype : result_dtype(args.out, dtype),
               Shape{R, is_gated ? N / 2 : N});
  const bool keeps = args.epilogue == ProductEpilogue::kSwigluKeepHidden;
  CROSSDOCK_CHECK(keeps == args.hidden.given(), "hidden must be given with kSwigluKeepHidden only");
  if (keeps) check_tensor("hidden", args.hidden, device, dtype, Shape{R, N});
  check_device_segments(args.segments, E_local, device);
  check_no_overlap({{"out", args.out}, {"hidden", args.hidden}},
                   {{"x", args.x}, {"w", args.w}, {"bias", args.bias}});
  return sizes;
}

ProductSizes check_product(const ProductDxArgs& args, Device device) {
  const ProductSizes sizes{.R = dim_of(args.grad, 2, 0, "grad"),
                           .E_local = dim_of(args.w, 3, 0, "w"),
                           .N = dim_of(args.w, 3, 1, "w"),
                           .K = dim_of(args.w, 3, 2, "w")};
  const auto [R, E_local, N, K] = sizes;
  const DType dtype = args.w.dtype;
  check_product_dtype(dtype);
  check_sizes(sizes);
  check_tensor("grad", args.grad, device, dtype, Shape{R, N});
  check_tensor("w", args.w, device, dtype, Shape{E_local, N, K});
  check_tensor("out", args.out, device, result_dtype(args.out, dtype), Shape{R, K});
  check_device_segments(args.segments, E_local, device);
  check_no_overlap({{"out", args.out}}, {{"grad", args.grad}, {"w", args.w}});
  return sizes;
}

ProductSizes check_product(const ProductDwArgs& args, Device device) {
  const ProductSizes sizes{.R = dim_of(args.grad, 2, 0, "grad"),
                           .E_local = dim_of(args.out, 3, 0, "out"),
                           .N = dim_of(args.grad, 2, 1, "grad"),
                           .K = dim_of(args.x, 2, 1, "x")};
  const auto [R, E_local, N, K] = sizes;
  const DType dtype = args.x.dtype;
  check_product_dtype(dtype);
  check_sizes(sizes);
  check_tensor("grad", args.grad, device, dtype, Shape{R, N});
  check_tensor("x", args.x, device, dtype, Shape{R, K});
  check_tensor("out", args.out, device, result_dtype(args.out, dtype), Shape{E_local, N, K});
  CROSSDOCK_CHECK(!args.accumulate || args.out.dtype == DType::kF32,
                  "accumulate needs an fp32 out, got ", name_of(args.out.dtype));
  check_device_segments(args.segments, E_local, device);
  check_no_overlap({{"out", args.out}}, {{"grad", args.grad}, {"x", args.x}});
  return sizes;
}

}  // namespace crossdock::ops
