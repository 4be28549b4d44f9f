#include <algorithm>
#include <type_traits>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "ops/cuda/grouped_product.hpp"
#include "ops/cuda/hopper/products.hpp"
#include "ops/cuda/plain/products.hpp"
#include "ops/cuda/product_scratch.hpp"

namespace crossdock::ops {
namespace {

int sms_of(Device device, int max_sms) {
  CROSSDOCK_CHECK(device.kind == DeviceKind::kCuda, "grouped products need a GPU");
  CROSSDOCK_CHECK(max_sms >= 0, "max_sms must not be negative, got ", max_sms);
  const int num_sms = cuda::num_sms(device.index);
  return max_sms > 0 ? std::min(max_sms, num_sms) : num_sms;
}

// The output of a product without rows or without experts.
void zero_all(const TensorView& out, Stream stream) {
  if (out.num_bytes() == 0) return;
  CROSSDOCK_CUDA(
      cudaMemsetAsync(out.data, 0, static_cast<size_t>(out.num_bytes()), cuda::handle_of(stream)));
}

}  // namespace

struct GroupedProducts::State {
  State(Device device_in, int max_sms, ProductKernels kernels)
      : device(device_in),
        num_sms(sms_of(device, max_sms)),
        scratch(ProductScratch::of(device.index)) {
    const cuda::CallGuard guard(device.index);
    plain::load_products();
    has_hopper_kernels = kernels == ProductKernels::kFastest && hopper::load_products();
  }

  /// zero_unused: whether the output becomes 0 where there is nothing to multiply.
  template <typename Args>
  void run(const Args& args, bool zero_unused, Stream stream) {
    const ProductSizes sizes = check_product(args, device);
    const cuda::CallGuard guard(device.index);
    if (sizes.R > 0 && sizes.E_local > 0) {
      launch(args, sizes, stream);
    } else if (zero_unused) {
      zero_all(args.out, stream);
    }
  }

  /// REQUIRES: checked arguments, and the device is current.
  template <typename Args>
  void launch(const Args& args, const ProductSizes& sizes, Stream stream) {
    const cudaStream_t handle = cuda::handle_of(stream);
    const int used_sms = std::max(1, num_sms - args.free_sms);
    if (!has_hopper_kernels || !hopper::takes(args, sizes)) {
      plain::launch_product(args, sizes, used_sms, handle);
      return;
    }
    const bool is_dw = std::is_same_v<Args, ProductDwArgs>;
    const auto memory = scratch.take(handle, is_dw ? hopper::dw_scratch_bytes(sizes.E_local) : 0);
    hopper::launch_product(args, sizes,
                           {.maps = tensor_maps,
                            .num_sms = used_sms,
                            .stream = handle,
                            .counters = memory.counters,
                            .dw_scratch = memory.bytes});
  }

  Device device;
  int num_sms;
  bool has_hopper_kernels = false;
  hopper::TensorMaps tensor_maps;
  ProductScratch& scratch;
};

GroupedProducts::GroupedProducts(Device device, int max_sms, ProductKernels kernels)
    : state_(std::make_unique<State>(device, max_sms, kernels)) {}
GroupedProducts::~GroupedProducts() = default;

void GroupedProducts::forward(const ProductForwardArgs& args, Stream stream) {
  state_->run(args, args.zero_unused_rows, stream);
}

void GroupedProducts::dx(const ProductDxArgs& args, Stream stream) {
  state_->run(args, args.zero_unused_rows, stream);
}

void GroupedProducts::dw(const ProductDwArgs& args, Stream stream) {
  state_->run(args, !args.accumulate, stream);
}

}  // namespace crossdock::ops
