#include <bit>
#include <cmath>
#include <limits>

#include "core/check.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

template <typename Element>
double to_value(Element element) {
  return static_cast<double>(element);
}
template <>
double to_value(BF16 element) {
  return to_float(element);
}
template <>
double to_value(F16 element) {
  return to_float(element);
}
template <>
double to_value(F8E4M3 element) {
  return to_float(element);
}

template <typename Element>
Element from_value(double value) {
  return static_cast<Element>(value);
}
template <>
BF16 from_value(double value) {
  return to_bf16(static_cast<float>(value));
}
template <>
F16 from_value(double value) {
  return to_f16(static_cast<float>(value));
}
template <>
F8E4M3 from_value(double value) {
  return to_f8e4m3(static_cast<float>(value));
}

// Calls visit(Element{}) with the element type of the dtype.
template <typename Visit>
auto with_element(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kF64:
      return visit(double{});
    case DType::kF32:
      return visit(float{});
    case DType::kBF16:
      return visit(BF16{});
    case DType::kF16:
      return visit(F16{});
    case DType::kF8E4M3:
      return visit(F8E4M3{});
    case DType::kI64:
      return visit(int64_t{});
    case DType::kI32:
      return visit(int32_t{});
    case DType::kBool:
      return visit(bool{});
    default:
      throw Error(ErrorCode::kInvalidArgument,
                  concat("the reference does not support dtype ", name_of(dtype)));
  }
}

}  // namespace

double round_to(DType dtype, double value) {
  return with_element(dtype,
                      [&](auto element) { return to_value(from_value<decltype(element)>(value)); });
}

OwnedTensor to_tensor(DType dtype, Shape shape, const std::vector<double>& values) {
  CROSSDOCK_CHECK(shape.num_elements() == static_cast<int64_t>(values.size()), "shape ",
                  shape.to_string(), " must have as many elements as there are values (",
                  values.size(), ")");
  const Buffer buffer(shape.num_elements() * size_of(dtype));
  const TensorView view = buffer.view(dtype, shape);
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const std::span<Element> elements = view.as<Element>();
    for (size_t i = 0; i < values.size(); ++i) elements[i] = from_value<Element>(values[i]);
  });
  return {view, buffer.owner()};
}

std::vector<double> to_values(ConstTensorView tensor) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(tensor.num_elements()));
  with_element(tensor.dtype, [&](auto element) {
    for (const auto& e : tensor.as<decltype(element)>()) values.push_back(to_value(e));
  });
  return values;
}

Comparison compare(const std::vector<double>& got, const std::vector<double>& wanted) {
  CROSSDOCK_CHECK(got.size() == wanted.size(), "arrays to compare must have the same size; got ",
                  got.size(), " and ", wanted.size());
  Comparison result;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool both_nan = std::isnan(got[i]) && std::isnan(wanted[i]);
    if (both_nan || std::bit_cast<uint64_t>(got[i]) == std::bit_cast<uint64_t>(wanted[i])) continue;
    if (result.num_different++ == 0) result.first = static_cast<int64_t>(i);
    const double error = std::abs(got[i] - wanted[i]);
    result.max_error = std::isfinite(error) ? std::max(result.max_error, error)
                                            : std::numeric_limits<double>::infinity();
  }
  return result;
}

}  // namespace crossdock::reference
