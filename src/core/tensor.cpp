#include "crossdock/tensor.hpp"

#include "core/check.hpp"

namespace crossdock {

Shape::Shape(std::initializer_list<int64_t> dims) {
  CROSSDOCK_CHECK(dims.size() <= kMaxRank, "a shape has at most ", kMaxRank, " dimensions, got ",
                  dims.size());
  for (const int64_t dim : dims) {
    CROSSDOCK_CHECK(dim >= 0, "a dimension must not be negative, got ", dim);
    dims_[static_cast<size_t>(rank_++)] = dim;
  }
}

int64_t Shape::num_elements() const {
  if (rank_ == 0) return 0;
  int64_t elements = 1;
  for (int i = 0; i < rank_; ++i) elements *= dims_[static_cast<size_t>(i)];
  return elements;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(dims_[static_cast<size_t>(i)]);
  }
  return text + "]";
}

template <typename Void>
void BasicTensorView<Void>::require_dtype(DType wanted) const {
  CROSSDOCK_CHECK(dtype == wanted, "the tensor's dtype must be ", name_of(wanted), ", it is ",
                  name_of(dtype));
}

template struct BasicTensorView<void>;
template struct BasicTensorView<const void>;

}  // namespace crossdock
