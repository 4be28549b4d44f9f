#include "ops/cuda/hopper/launch.cuh"
#include "ops/cuda/hopper/operands.hpp"
#include "ops/cuda/hopper/order_experts.cuh"

namespace crossdock::ops::hopper {
namespace {

// Chosen by speed relative to torch._grouped_mm, which writes bf16, on an H200, 12 cases: geometric
// mean 1.12, minimum 1.03; fp32 sums 1.03, 0.92. Current figures: bench/results/h200_layer.md.
using RoundedShape = TileShape<4, 192, false>;
using SumsShape = TileShape<2, 256, false>;

template <typename Element>
using RoundedDw = Product<Element, Operation::kDw, RoundedShape,
                          RowsEpilogue<Element, RoundedShape::kColumns, false>>;
template <typename Element, bool kAccumulate>
using SumsDw =
    Product<Element, Operation::kDw, SumsShape, SumsEpilogue<SumsShape::kColumns, kAccumulate>>;

template <typename Element>
bool load_all() {
  return load_product<RoundedDw<Element>>() && load_product<SumsDw<Element, false>>() &&
         load_product<SumsDw<Element, true>>();
}

int64_t order_bytes(int64_t E_local) {
  constexpr int64_t kMapAlignment = alignof(OperandMaps) > 128 ? alignof(OperandMaps) : 128;
  const int64_t num_bytes = E_local * static_cast<int64_t>(sizeof(OrderedExpert));
  return (num_bytes + kMapAlignment - 1) / kMapAlignment * kMapAlignment;
}

void order_experts(const ProductDwArgs& args, const ProductSizes& sizes, const OperandMaps& maps,
                   const LaunchContext& context) {
  auto* const order = reinterpret_cast<OrderedExpert*>(context.dw_scratch);
  auto* const expert_maps =
      reinterpret_cast<OperandMaps*>(context.dw_scratch + order_bytes(sizes.E_local));
  const OrderExpertsArgs order_args{.starts = args.segments.starts,
                                    .counts = args.segments.counts,
                                    .num_experts = static_cast<int>(sizes.E_local),
                                    .a = args.grad.data,
                                    .b = args.x.data,
                                    .a_row_bytes = args.grad.row_bytes(),
                                    .b_row_bytes = args.x.row_bytes(),
                                    .order = order,
                                    .maps = expert_maps};
  order_experts_kernel<<<static_cast<unsigned>(sizes.E_local), 32, 0, context.stream>>>(maps,
                                                                                        order_args);
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace

int64_t dw_scratch_bytes(int64_t E_local) {
  return order_bytes(E_local) + E_local * static_cast<int64_t>(sizeof(OperandMaps));
}

bool load_dw() {
  cuda::load_kernels(order_experts_kernel);
  return load_all<BF16>() && load_all<F16>();
}

void launch_product(const ProductDwArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context) {
  const bool keeps_sums = args.out.dtype == DType::kF32;
  const OperandMaps maps = make_operand_maps(
      context.maps, {.operation = Operation::kDw,
                     .dtype = args.grad.dtype,
                     .a = args.grad.data,
                     .b = args.x.data,
                     .sizes = sizes,
                     .tile_columns = keeps_sums ? SumsShape::kColumns : RoundedShape::kColumns});
  order_experts(args, sizes, maps, context);
  ProductParams params = make_params(sizes, args.segments, args.out, context);
  params.whole_a_blocks = has_whole_blocks(sizes.N);
  params.whole_b_blocks = has_whole_blocks(sizes.K);
  params.order = reinterpret_cast<const OrderedExpert*>(context.dw_scratch);
  params.expert_maps =
      reinterpret_cast<const OperandMaps*>(context.dw_scratch + order_bytes(sizes.E_local));
  with_element(args.grad.dtype, [&]<typename Element>(Element) {
    if (!keeps_sums) {
      launch_kernel<RoundedDw<Element>>(maps, params, context, true);
    } else if (args.accumulate) {
      launch_kernel<SumsDw<Element, true>>(maps, params, context, true);
    } else {
      launch_kernel<SumsDw<Element, false>>(maps, params, context, true);
    }
  });
}

}  // namespace crossdock::ops::hopper
