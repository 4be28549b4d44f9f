// Rows in fp8 through the C API have the bits of the C++ API.
#include "crossdock/fp8.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

constexpr int64_t kTokens = 3;
constexpr int64_t kWidth = 200;

crossdock_tensor fp8_tensor(const void* data, int32_t dtype, int64_t width) {
  crossdock_tensor made_tensor{};
  made_tensor.data = const_cast<void*>(data);
  made_tensor.shape[0] = kTokens;
  made_tensor.shape[1] = width;
  made_tensor.num_dims = 2;
  made_tensor.dtype = dtype;
  return made_tensor;
}

class CFp8 : public ::testing::Test {
 protected:
  CFp8()
      : x(kTokens * kWidth),
        values(x.size()),
        scales(2 * kTokens),
        bytes(7 * kTokens),
        out(x.size()) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = 0.37F * static_cast<float>(i % 41) - 5.0F;
  }

  crossdock_quantise_rows_args args() const {
    auto given = made<crossdock_quantise_rows_args>();
    given.x = fp8_tensor(x.data(), CROSSDOCK_F32, kWidth);
    given.values = fp8_tensor(values.data(), CROSSDOCK_F8E4M3, kWidth);
    given.scales = fp8_tensor(scales.data(), CROSSDOCK_F32, 2);
    return given;
  }

  std::vector<float> x;
  std::vector<F8E4M3> values;
  std::vector<float> scales;
  std::vector<E8M0> bytes;
  std::vector<float> out;
};

TEST_F(CFp8, RowsHaveTheBitsOfTheCppApi) {
  std::vector<F8E4M3> wanted(x.size());
  std::vector<float> wanted_scales(scales.size());
  std::vector<float> wanted_out(x.size());
  quantise_rows({.x = {x.data(), {kTokens, kWidth}},
                 .values = {wanted.data(), {kTokens, kWidth}},
                 .scales = {wanted_scales.data(), {kTokens, 2}},
                 .scale = Fp8Scale::kExact,
                 .amax_floor = 5.5F});
  dequantise_rows({.values = {wanted.data(), {kTokens, kWidth}},
                   .scales = {wanted_scales.data(), {kTokens, 2}},
                   .out = {wanted_out.data(), {kTokens, kWidth}}});
  auto given = args();
  given.scale = CROSSDOCK_FP8_SCALE_EXACT;
  given.amax_floor = 5.5;
  ASSERT_OK(crossdock_quantise_rows(&given));
  auto back = made<crossdock_dequantise_rows_args>();
  back.values = given.values;
  back.scales = given.scales;
  back.out = fp8_tensor(out.data(), CROSSDOCK_F32, kWidth);
  ASSERT_OK(crossdock_dequantise_rows(&back));
  EXPECT_EQ(std::memcmp(values.data(), wanted.data(), values.size()), 0);
  EXPECT_EQ(scales, wanted_scales);
  EXPECT_EQ(out, wanted_out);
}

TEST_F(CFp8, ScalesMayBeExponents) {
  auto given = args();
  given.scales = fp8_tensor(bytes.data(), CROSSDOCK_E8M0, 7);
  ASSERT_OK(crossdock_quantise_rows(&given));
  EXPECT_EQ(bytes[0].bits, 127 - 6);  // amax 6.84 = 1.71 * 2^2, so 2^(2 - 8)
}

TEST_F(CFp8, RefusesAnUnknownScaleAndNull) {
  auto given = args();
  given.scale = 2;
  EXPECT_EQ(crossdock_quantise_rows(&given), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(crossdock_last_error()),
            "scale must be CROSSDOCK_FP8_SCALE_POW2 (0) or CROSSDOCK_FP8_SCALE_EXACT (1), got 2");
  given = args();
  given.amax_floor = 1e300;  // infinite in fp32
  EXPECT_EQ(crossdock_quantise_rows(&given), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(crossdock_quantise_rows(nullptr), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_EQ(crossdock_dequantise_rows(nullptr), CROSSDOCK_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace crossdock::capi_test
