#include "crossdock/tensor.hpp"

#include <limits>

#include "core/check.hpp"
#include "core/sizes.hpp"

namespace crossdock {
namespace {

int64_t checked_product(std::initializer_list<int64_t> factors, const Shape& shape) {
  const auto product = product_within(std::numeric_limits<int64_t>::max(), factors);
  CROSSDOCK_CHECK(product, "a tensor of shape ", shape.to_string(),
                  " is too large for 64-bit sizes");
  return *product;
}

}  // namespace

Shape::Shape(std::span<const int64_t> dims) {
  CROSSDOCK_CHECK(dims.size() <= kMaxRank, "a shape has at most ", kMaxRank, " dimensions, got ",
                  dims.size());
  for (const int64_t dim : dims) {
    CROSSDOCK_CHECK(dim >= 0, "a dimension must not be negative, got ", dim);
    dims_[static_cast<size_t>(rank_++)] = dim;
  }
}

int64_t Shape::num_elements() const {
  const auto dim = [&](size_t i) { return static_cast<int>(i) < rank_ ? dims_[i] : 1; };
  return rank_ == 0 ? 0 : checked_product({dim(0), dim(1), dim(2), dim(3)}, *this);
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(dims_[static_cast<size_t>(i)]);
  }
  return text + "]";
}

template <typename Void>
int64_t BasicTensorView<Void>::num_bytes() const {
  return checked_product({num_elements(), size_of(dtype)}, shape);
}

template <typename Void>
int64_t BasicTensorView<Void>::row_bytes() const {
  const auto dim = [&](int i) { return i < shape.rank() ? shape[i] : 1; };
  return checked_product({dim(1), dim(2), dim(3), size_of(dtype)}, shape);
}

template <typename Void>
void BasicTensorView<Void>::require_dtype(DType wanted) const {
  CROSSDOCK_CHECK(dtype == wanted, "the tensor's dtype must be ", name_of(wanted), ", it is ",
                  name_of(dtype));
}

template struct BasicTensorView<void>;
template struct BasicTensorView<const void>;

}  // namespace crossdock
