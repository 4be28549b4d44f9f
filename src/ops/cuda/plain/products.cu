#include <algorithm>

#include "core/cuda/check.hpp"
#include "core/cuda/launch.hpp"
#include "core/tensor_memory.hpp"
#include "ops/cuda/plain/product_kernels.cuh"
#include "ops/cuda/plain/products.hpp"

namespace crossdock::ops::plain {
namespace {

constexpr int kBlocksPerSm = 8;

template <typename Element>
void load_all() {
  cuda::load_kernels(row_product_kernel<Element, Element, true, false>,
                     row_product_kernel<Element, Element, true, true>,
                     row_product_kernel<Element, Element, false, false>,
                     row_product_kernel<Element, float, true, false>,
                     row_product_kernel<Element, float, false, false>, dw_kernel<Element, Element>,
                     dw_kernel<Element, float>);
}

// Calls work with values of the types of rows and of results, for template arguments.
template <typename Work>
void with_types(DType dtype, DType result, const Work& work) {
  const auto with_result = [&]<typename Element>(Element element) {
    if (result == DType::kF32) {
      work(element, float{});
    } else {
      work(element, element);
    }
  };
  if (dtype == DType::kBF16) {
    with_result(BF16{});
  } else if (dtype == DType::kF16) {
    with_result(F16{});
  } else {
    with_result(float{});
  }
}

template <typename Element, typename Result, bool kIsForward, bool kIsGated>
void launch_rows(const RowProductParams<Element, Result>& params, int num_sms,
                 cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(num_sms * kBlocksPerSm);
  row_product_kernel<Element, Result, kIsForward, kIsGated>
      <<<blocks, kThreads, 0, stream>>>(params);
  CROSSDOCK_CUDA(cudaGetLastError());
}

UnusedRows unused_rows(const Segments& segments, const TensorView& out, bool is_zeroed) {
  return {.starts = segments.starts,
          .counts = segments.counts,
          .num_experts = static_cast<int>(segments.num_segments),
          .R = out.num_rows(),
          .rows = is_zeroed ? static_cast<std::byte*>(out.data) : nullptr,
          .row_bytes = out.row_bytes()};
}

template <typename Element, typename Result>
RowProductParams<Element, Result> row_params(const ConstTensorView& rows, const ConstTensorView& w,
                                             const Segments& segments, const TensorView& out,
                                             const ProductSizes& sizes) {
  RowProductParams<Element, Result> params{};
  params.starts = segments.starts;
  params.counts = segments.counts;
  params.num_experts = static_cast<int>(sizes.E_local);
  params.rows = pointer<Element>(rows);
  params.w = pointer<Element>(w);
  params.N = static_cast<int>(sizes.N);
  params.K = static_cast<int>(sizes.K);
  params.out = pointer<Result>(out);
  return params;
}

}  // namespace

void load_products() {
  load_all<BF16>();
  load_all<F16>();
  load_all<float>();
}

void launch_product(const ProductForwardArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream) {
  with_types(args.x.dtype, args.out.dtype, [&]<typename Element, typename Result>(Element, Result) {
    auto params = row_params<Element, Result>(args.x, args.w, args.segments, args.out, sizes);
    params.bias = pointer<Element>(args.bias);
    params.hidden = pointer<Element>(args.hidden);
    params.interleaved = args.interleaved;
    params.unused = unused_rows(args.segments, args.out, args.zero_unused_rows);
    if (args.epilogue == ProductEpilogue::kNone) {
      launch_rows<Element, Result, true, false>(params, num_sms, stream);
    } else if constexpr (std::is_same_v<Element, Result>) {  // checked
      launch_rows<Element, Result, true, true>(params, num_sms, stream);
    }
  });
}

void launch_product(const ProductDxArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream) {
  with_types(args.grad.dtype, args.out.dtype,
             [&]<typename Element, typename Result>(Element, Result) {
               auto params =
                   row_params<Element, Result>(args.grad, args.w, args.segments, args.out, sizes);
               params.unused = unused_rows(args.segments, args.out, args.zero_unused_rows);
               launch_rows<Element, Result, false, false>(params, num_sms, stream);
             });
}

void launch_product(const ProductDwArgs& args, const ProductSizes& sizes, int num_sms,
                    cudaStream_t stream) {
  const int64_t tiles = (sizes.N + kTile - 1) / kTile * ((sizes.K + kTile - 1) / kTile);
  const auto blocks =
      static_cast<unsigned>(std::min(tiles * sizes.E_local, int64_t{num_sms} * kBlocksPerSm));
  with_types(
      args.grad.dtype, args.out.dtype, [&]<typename Element, typename Result>(Element, Result) {
        const DwParams<Element, Result> params{.starts = args.segments.starts,
                                               .counts = args.segments.counts,
                                               .num_experts = static_cast<int>(sizes.E_local),
                                               .grad = pointer<Element>(args.grad),
                                               .x = pointer<Element>(args.x),
                                               .N = static_cast<int>(sizes.N),
                                               .K = static_cast<int>(sizes.K),
                                               .out = pointer<Result>(args.out),
                                               .accumulate = args.accumulate};
        dw_kernel<Element, Result><<<blocks, kThreads, 0, stream>>>(params);
        CROSSDOCK_CUDA(cudaGetLastError());
      });
}

}  // namespace crossdock::ops::plain
