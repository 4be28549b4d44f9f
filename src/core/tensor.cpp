#include "crossdock/tensor.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "core/text.hpp"
#include "crossdock/dtype.hpp"

namespace crossdock {
namespace {

using NamedDType = std::pair<DType, std::string_view>;
constexpr std::array<NamedDType, 10> kNames = {{
    {DType::kF64, "fp64"},
    {DType::kF32, "fp32"},
    {DType::kBF16, "bf16"},
    {DType::kF16, "fp16"},
    {DType::kF8E4M3, "fp8_e4m3"},
    {DType::kE8M0, "e8m0"},
    {DType::kI64, "int64"},
    {DType::kI32, "int32"},
    {DType::kU8, "uint8"},
    {DType::kBool, "bool"},
}};

}  // namespace

std::string_view name_of(DType dtype) noexcept {
  for (const auto& [known, name] : kNames) {
    if (known == dtype) return name;
  }
  return "unknown";
}

DType parse_dtype(std::string_view name) {
  return kNames[index_of_name("dtype", name, kNames, &NamedDType::second)].first;
}

std::optional<int64_t> product_within(int64_t limit, std::initializer_list<int64_t> factors) {
  if (std::find(factors.begin(), factors.end(), 0) != factors.end()) return 0;
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (factor > limit / product) return std::nullopt;
    product *= factor;
  }
  return product;
}

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
