#include <cstdint>

#include "core/cuda/launch.hpp"
#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/operands.hpp"
#include "ops/cuda/hopper/product_kernel.cuh"
#include "ops/cuda/hopper/product_params.hpp"

// Prepares a dW: the order of its experts, and tensor maps that end with each expert's rows. Rows
// of other experts are never read; the copy engine writes zeros instead.

namespace crossdock::ops::hopper {

struct OrderExpertsArgs {
  const int64_t* starts;
  const int64_t* counts;
  int num_experts;
  const void* a;  // grad [R, N]
  const void* b;  // x [R, K]
  int64_t a_row_bytes;
  int64_t b_row_bytes;
  OrderedExpert* order;  // out [num_experts]
  OperandMaps* maps;     // out [num_experts], in the same order
};

/// The number of experts that come before `expert`: larger ones, and equally large ones with a
/// lower index. Called by a whole warp.
__device__ inline int place_in_order(const OrderExpertsArgs& args, int expert, int lane) {
  const int64_t own = args.counts[expert];
  int before = 0;
  for (int e = lane; e < args.num_experts; e += 32) {
    const int64_t count = args.counts[e];
    before += count > own || (count == own && e < expert) ? 1 : 0;
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    before += __shfl_xor_sync(~0u, before, distance);
  }
  return before;
}

// A block of one warp takes one expert; lanes 0 to 3 edit one map each.
static __global__ void order_experts_kernel(const __grid_constant__ OperandMaps maps,
                                            const __grid_constant__ OrderExpertsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kMaps = sizeof(OperandMaps) / sizeof(CUtensorMap);
  constexpr int kWords = sizeof(CUtensorMap) / sizeof(uint64_t);
  static_assert(kMaps == 4);
  __shared__ alignas(128) uint64_t edited[kMaps][kWords];
  cuda::allow_next_kernel();
  const int expert = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x);
  const int place = place_in_order(args, expert, lane);
  const int64_t start = args.starts[expert];
  const auto num_rows = static_cast<int>(args.counts[expert]);
  if (lane == 0) args.order[place] = {expert, num_rows};
  const auto* words = reinterpret_cast<const uint64_t*>(&maps);
  for (int i = lane; i < kMaps * kWords; i += 32) edited[i / kWords][i % kWords] = words[i];
  __syncwarp();
  if (lane < kMaps) {
    const bool is_a = lane < 2;
    const auto* rows = static_cast<const std::byte*>(is_a ? args.a : args.b) +
                       start * (is_a ? args.a_row_bytes : args.b_row_bytes);
    const SharedAddress map = shared_address(edited[lane]);
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(map),
                 "l"(rows)
                 : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(map),
                 "r"(max(1, num_rows))
                 : "memory");
  }
  __syncwarp();
  auto* const to = reinterpret_cast<CUtensorMap*>(args.maps + place);
  for (int i = 0; i < kMaps; ++i) {
    asm volatile(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        " [%0], [%1], 128;" ::"l"(to + i),
        "r"(shared_address(edited[i]))
        : "memory");
  }
#endif
}

}  // namespace crossdock::ops::hopper

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
