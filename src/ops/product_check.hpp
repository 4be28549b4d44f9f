#pragma once

#include <cstdint>

#include "ops/grouped_product.hpp"

namespace crossdock::ops {

/// The sizes of a product: w is [E_local, N, K], there are up to R rows.
struct ProductSizes {
  int64_t R = 0;
  int64_t E_local = 0;
  int64_t N = 0;
  int64_t K = 0;
};

// These throw if the arguments are not valid for a product on `device`.

ProductSizes check_product(const ProductForwardArgs& args, Device device);
ProductSizes check_product(const ProductDxArgs& args, Device device);
ProductSizes check_product(const ProductDwArgs& args, Device device);

}  // namespace crossdock::ops
