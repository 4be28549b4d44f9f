#include "crossdock/error.hpp"
#include "ops/cuda/grouped_product.hpp"

namespace crossdock::ops {
namespace {

[[noreturn]] void refuse_products() {
  throw Error(ErrorCode::kUnsupported, "grouped products on a GPU: this build has no CUDA");
}

}  // namespace

struct GroupedProducts::State {};

GroupedProducts::GroupedProducts(Device /*device*/, int /*max_sms*/, ProductKernels /*kernels*/) {
  refuse_products();
}
GroupedProducts::~GroupedProducts() = default;

void GroupedProducts::forward(const ProductForwardArgs& /*args*/, Stream /*stream*/) {
  refuse_products();
}
void GroupedProducts::dx(const ProductDxArgs& /*args*/, Stream /*stream*/) {
  refuse_products();
}
void GroupedProducts::dw(const ProductDwArgs& /*args*/, Stream /*stream*/) {
  refuse_products();
}

}  // namespace crossdock::ops
