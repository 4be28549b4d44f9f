#include "crossdock/dtype.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "crossdock/error.hpp"

namespace crossdock {
namespace {

// Every finite value of a small float format, by its definition: sign, exponent, mantissa.
double decode(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits >> (exponent_bits + mantissa_bits)) != 0 ? -1.0 : 1.0;
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                               : std::ldexp(1.0 + fraction, exponent - bias));
}

TEST(DType, EveryFiniteHalfDecodesByDefinitionAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const F16 half{static_cast<uint16_t>(bits)};
    if ((bits & 0x7c00) == 0x7c00) continue;
    ASSERT_EQ(to_float(half), decode(bits, 5, 10)) << bits;
    ASSERT_EQ(to_f16(to_float(half)).bits, bits);
  }
  EXPECT_EQ(to_float(F16{0x7c00}), std::numeric_limits<float>::infinity());
  EXPECT_EQ(to_float(F16{0xfc00}), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(to_float(F16{0x7e01})));
}

TEST(DType, EveryFiniteBf16DecodesByDefinitionAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BF16 value{static_cast<uint16_t>(bits)};
    if ((bits & 0x7f80) == 0x7f80) continue;
    ASSERT_EQ(to_float(value), decode(bits, 8, 7)) << bits;
    ASSERT_EQ(to_bf16(to_float(value)).bits, bits);
  }
}

TEST(DType, EveryFp8DecodesByDefinitionAndComesBack) {
  for (uint32_t bits = 0; bits < 0x100; ++bits) {
    const F8E4M3 value{static_cast<uint8_t>(bits)};
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(to_float(value)));
      continue;
    }
    ASSERT_EQ(to_float(value), decode(bits, 4, 3)) << bits;
    ASSERT_EQ(to_f8e4m3(to_float(value)).bits, bits);
  }
  EXPECT_EQ(to_float(to_f8e4m3(1e9f)), 448.0f);
  EXPECT_EQ(to_float(to_f8e4m3(-1e9f)), -448.0f);
  EXPECT_EQ(to_float(to_f8e4m3(470.0f)), 448.0f);  // nearest to the encoding of NaN
}

// Nearest even by search among the neighbours, for any encoder of 16-bit floats.
template <typename Small, typename Encode>
void expect_nearest_even(Encode encode, uint32_t infinity_bits) {
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(encode(value))));
      continue;
    }
    const Small result = encode(value);
    if ((result.bits & 0x7fff) >= infinity_bits) continue;  // overflow is tested separately
    const double error = std::abs(static_cast<double>(to_float(result)) - value);
    for (const int step : {-1, 1}) {
      const Small other{static_cast<uint16_t>(result.bits + step)};
      if ((other.bits & 0x7fff) >= infinity_bits || (other.bits ^ result.bits) & 0x8000) continue;
      const double other_error = std::abs(static_cast<double>(to_float(other)) - value);
      ASSERT_LE(error, other_error) << value;
      ASSERT_TRUE(error < other_error || (result.bits & 1) == 0) << value << ": ties to even";
    }
  }
}

TEST(DType, HalfRoundsToNearestEvenDenormalsIncluded) {
  expect_nearest_even<F16>(to_f16, 0x7c00);
  EXPECT_EQ(to_f16(65519.0f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0);  // a tie between 0 and the smallest denormal: even
  EXPECT_EQ(to_f16(0x1.8p-25f).bits, 1);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
}

TEST(DType, Bf16RoundsToNearestEvenDenormalsIncluded) {
  expect_nearest_even<BF16>(to_bf16, 0x7f80);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(DType, E8m0IsAPowerOfTwo) {
  EXPECT_EQ(to_float(E8M0{127}), 1.0f);
  EXPECT_EQ(to_float(E8M0{0}), 0x1p-127f);
  EXPECT_EQ(to_float(E8M0{254}), 0x1p127f);
  EXPECT_TRUE(std::isnan(to_float(E8M0{255})));
}

TEST(DType, NamesAreReadBackAndUnknownOnesAreRefusedWithTheList) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3,
                            DType::kE8M0, DType::kI64, DType::kI32, DType::kU8, DType::kBool}) {
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  }
  try {
    parse_dtype("float");
    FAIL() << "expected crossdock::Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), testing::HasSubstr("fp32, bf16"));
    EXPECT_THAT(error.what(), testing::HasSubstr("got \"float\""));
  }
}

}  // namespace
}  // namespace crossdock
