#include "crossdock/dtype.hpp"

#include <array>
#include <utility>

#include "core/text.hpp"

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

F8E4M3 to_f8e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return F8E4M3{static_cast<uint8_t>(sign | 0x7fu)};
  constexpr uint32_t kSmallestNormal = 0x3c800000u;  // 2^-6
  uint32_t result = 0;
  if (magnitude < kSmallestNormal) {
    // Adding 2^14 makes the FPU round to multiples of 2^-9, the denormal grid.
    result = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) -
             std::bit_cast<uint32_t>(0x1p14f);
  } else {
    result = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  }
  constexpr uint32_t kLargest = 0x7eu;  // 448
  return F8E4M3{static_cast<uint8_t>(sign | (result > kLargest ? kLargest : result))};
}

}  // namespace crossdock
