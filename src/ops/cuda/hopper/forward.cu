#include "ops/cuda/hopper/operands.hpp"
#include "ops/cuda/hopper/product_kernel.cuh"

namespace crossdock::ops::hopper {
namespace {

// Chosen by speed relative to torch._grouped_mm on an H200, 12 cases: geometric mean 1.10, minimum
// 1.01; 128 x 256 without turns had 1.06, 1.02. Current figures: bench/results/h200_layer.md.
using ForwardShape = TileShape<2, 192, true>;
// Storing fp32 sums needs registers that a tile with turns does not leave.
using SumsShape = TileShape<2, 256, false>;

template <typename Element>
using Forward = Product<Element, Operation::kForward, ForwardShape,
                        RowsEpilogue<Element, ForwardShape::kColumns, true>>;
template <typename Element>
using SumsForward = Product<Element, Operation::kForward, SumsShape,
                            BiasedSumsEpilogue<Element, SumsShape::kColumns>>;

}  // namespace

bool load_forward() {
  return load_product<Forward<BF16>>() && load_product<Forward<F16>>() &&
         load_product<SumsForward<BF16>>() && load_product<SumsForward<F16>>();
}

void launch_rows_forward(const ProductForwardArgs& args, const ProductSizes& sizes,
                         const LaunchContext& context) {
  ProductParams params = make_params(sizes, args.segments, args.out, context);
  params.bias = args.bias.data;
  if (args.zero_unused_rows) params.unused = unused_rows_of(args.segments, args.out);
  const bool is_rounded = args.out.dtype != DType::kF32;
  const OperandMaps maps = make_operand_maps(
      context.maps, {.operation = Operation::kForward,
                     .dtype = args.x.dtype,
                     .a = args.x.data,
                     .b = args.w.data,
                     .sizes = sizes,
                     .tile_columns = is_rounded ? ForwardShape::kColumns : SumsShape::kColumns});
  with_element(args.x.dtype, [&]<typename Element>(Element) {
    if (is_rounded) {
      launch_kernel<Forward<Element>>(maps, params, context, false);
    } else {
      launch_kernel<SumsForward<Element>>(maps, params, context, false);
    }
  });
}

}  // namespace crossdock::ops::hopper
