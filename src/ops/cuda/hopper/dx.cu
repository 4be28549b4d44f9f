#include "ops/cuda/hopper/operands.hpp"
#include "ops/cuda/hopper/product_kernel.cuh"

namespace crossdock::ops::hopper {
namespace {

// Chosen by speed relative to torch._grouped_mm on an H200, 12 cases: geometric mean 1.06, minimum
// 1.01. Current figures: bench/results/h200_layer.md.
using DxShape = TileShape<2, 256, false>;

template <typename Element>
using Dx =
    Product<Element, Operation::kDx, DxShape, RowsEpilogue<Element, DxShape::kColumns, false>>;
template <typename Element>
using SumsDx = Product<Element, Operation::kDx, DxShape, SumsEpilogue<DxShape::kColumns, false>>;

}  // namespace

bool load_dx() {
  return load_product<Dx<BF16>>() && load_product<Dx<F16>>() && load_product<SumsDx<BF16>>() &&
         load_product<SumsDx<F16>>();
}

void launch_product(const ProductDxArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context) {
  ProductParams params = make_params(sizes, args.segments, args.out, context);
  params.whole_b_blocks = has_whole_blocks(sizes.K);
  if (args.zero_unused_rows) params.unused = unused_rows_of(args.segments, args.out);
  const OperandMaps maps = make_operand_maps(context.maps, {.operation = Operation::kDx,
                                                            .dtype = args.grad.dtype,
                                                            .a = args.grad.data,
                                                            .b = args.w.data,
                                                            .sizes = sizes,
                                                            .tile_columns = DxShape::kColumns});
  with_element(args.grad.dtype, [&]<typename Element>(Element) {
    if (args.out.dtype == DType::kF32) {
      launch_kernel<SumsDx<Element>>(maps, params, context, false);
    } else {
      launch_kernel<Dx<Element>>(maps, params, context, false);
    }
  });
}

}  // namespace crossdock::ops::hopper
