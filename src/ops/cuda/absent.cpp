#include "crossdock/error.hpp"
#include "ops/cuda/device_rows.hpp"
#include "ops/cuda/grouped_product.hpp"

namespace crossdock::ops {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported, "this build has no CUDA, and the tensors are on a GPU");
}

}  // namespace

void copy_blocks_on_device(const CopyBlocksArgs& /*args*/, Device /*device*/, Stream /*stream*/) {
  refuse();
}

void fill_on_device(std::byte* /*data*/, uint8_t /*value*/, int64_t /*num_bytes*/,
                    Device /*device*/, Stream /*stream*/) {
  refuse();
}

void add_on_device(const AddArgs& /*args*/, Stream /*stream*/) {
  refuse();
}

void round_on_device(const ConstTensorView& /*sums*/, const TensorView& /*out*/,
                     Stream /*stream*/) {
  refuse();
}

Segments write_segment_on_device(int64_t /*num_rows*/, const TensorView& /*memory*/,
                                 Stream /*stream*/) {
  refuse();
}

struct GroupedProducts::State {};

GroupedProducts::GroupedProducts(Device /*device*/, int /*max_sms*/, ProductKernels /*kernels*/) {
  refuse();
}
GroupedProducts::~GroupedProducts() = default;

void GroupedProducts::forward(const ProductForwardArgs& /*args*/, Stream /*stream*/) {
  refuse();
}
void GroupedProducts::dx(const ProductDxArgs& /*args*/, Stream /*stream*/) {
  refuse();
}
void GroupedProducts::dw(const ProductDwArgs& /*args*/, Stream /*stream*/) {
  refuse();
}

}  // namespace crossdock::ops
