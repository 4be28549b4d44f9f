#include "core/sizes.hpp"

#include <algorithm>

namespace crossdock {

std::optional<int64_t> product_within(int64_t limit, std::initializer_list<int64_t> factors) {
  if (std::find(factors.begin(), factors.end(), 0) != factors.end()) return 0;
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (factor > limit / product) return std::nullopt;
    product *= factor;
  }
  return product;
}

}  // namespace crossdock
