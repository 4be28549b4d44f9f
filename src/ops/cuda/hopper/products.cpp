#include "ops/cuda/hopper/products.hpp"

#include "core/cuda/device.hpp"

namespace crossdock::ops::hopper {
namespace {

constexpr int64_t kMostColumns = int64_t{1} << 26;  // byte offsets in a row are 32-bit

bool is_aligned(const ConstTensorView& tensor, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0;
}

template <typename... Tensors>
bool fit(const ProductSizes& sizes, DType dtype, const Tensors&... tensors) {
  const bool is_narrow = sizes.N <= kMostColumns && sizes.K <= kMostColumns;
  return (dtype == DType::kBF16 || dtype == DType::kF16) && is_narrow && sizes.N % 8 == 0 &&
         sizes.K % 8 == 0 && (is_aligned(tensors, 16) && ...);
}

}  // namespace

bool load_products() {
  int major = 0;
  int minor = 0;
  const int device = cuda::current_device();
  CROSSDOCK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CROSSDOCK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0) return false;
  return load_forward() && load_swiglu() && load_dx() && load_dw();
}

bool takes(const ProductForwardArgs& args, const ProductSizes& sizes) {
  const bool is_gated = args.epilogue != ProductEpilogue::kNone;
  return fit(sizes, args.x.dtype, args.x, args.w, args.out, args.hidden) &&
         is_aligned(args.bias, 4) && (!is_gated || sizes.N % 16 == 0);
}

bool takes(const ProductDxArgs& args, const ProductSizes& sizes) {
  return fit(sizes, args.grad.dtype, args.grad, args.w, args.out);
}

bool takes(const ProductDwArgs& args, const ProductSizes& sizes) {
  return fit(sizes, args.grad.dtype, args.grad, args.x, args.out);
}

void launch_product(const ProductForwardArgs& args, const ProductSizes& sizes,
                    const LaunchContext& context) {
  if (args.epilogue == ProductEpilogue::kNone) {
    launch_rows_forward(args, sizes, context);
  } else {
    launch_swiglu_forward(args, sizes, context);
  }
}

}  // namespace crossdock::ops::hopper
