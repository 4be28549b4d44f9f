#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/fp8.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock {
namespace {

using ::testing::ElementsAre;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- The same rows by the library and by the reference, as bits ----

struct Format {
  DType scales = DType::kF32;
  Fp8Scale scale = Fp8Scale::kPow2;
  float amax_floor = 0.0f;
  int64_t group() const { return fp8_group_size(scales); }
};

constexpr Format kFormats[] = {{},
                               {.amax_floor = 1e-4f},
                               {.scale = Fp8Scale::kExact},
                               {.scale = Fp8Scale::kExact, .amax_floor = 1e-4f},
                               {.scales = DType::kE8M0}};

struct Quantised {
  std::vector<F8E4M3> values;
  std::vector<float> scales;  // decoded, if they are e8m0
};

template <typename Element>
Quantised quantise(const std::vector<Element>& x, int64_t D, const Format& format,
                   ThreadPool* pool = nullptr) {
  const int64_t T = static_cast<int64_t>(x.size()) / D;
  const int64_t num_scales = (D + format.group() - 1) / format.group();
  std::vector<E8M0> bytes(static_cast<size_t>(T * num_scales));
  Quantised out{std::vector<F8E4M3>(x.size()), std::vector<float>(bytes.size())};
  const bool has_bytes = format.scales == DType::kE8M0;
  quantise_rows({.x = {x.data(), {T, D}},
                 .values = {out.values.data(), {T, D}},
                 .scales = has_bytes ? TensorView(bytes.data(), {T, num_scales})
                                     : TensorView(out.scales.data(), {T, num_scales}),
                 .scale = format.scale,
                 .amax_floor = format.amax_floor,
                 .pool = pool});
  for (size_t i = 0; has_bytes && i < bytes.size(); ++i) out.scales[i] = to_float(bytes[i]);
  return out;
}

Quantised expected(const std::vector<double>& x, int64_t D, const Format& format) {
  const reference::Fp8Rows rows =
      reference::quantise_rows(x, {.width = D,
                                   .group = format.group(),
                                   .scale = format.scale,
                                   .amax_floor = double{format.amax_floor}});
  Quantised out;
  for (const double v : rows.values) {
    out.values.push_back(std::isnan(v) ? F8E4M3{0x7f} : to_f8e4m3(static_cast<float>(v)));
  }
  for (const double v : rows.scales) out.scales.push_back(static_cast<float>(v));
  return out;
}

template <typename Element>
void expect_reference(const std::vector<Element>& x, int64_t D, const Format& format) {
  const Quantised got = quantise(x, D, format);
  std::vector<double> wide(x.size());
  for (size_t i = 0; i < x.size(); ++i) wide[i] = to_float(x[i]);
  const Quantised wanted = expected(wide, D, format);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(got.values[i].bits, wanted.values[i].bits)
        << "value " << i << ", x " << wide[i] << ", D " << D << ", scale " << name_of(format.scale)
        << " " << name_of(format.scales);
  }
  for (size_t i = 0; i < got.scales.size(); ++i) {
    const bool is_nan = std::isnan(got.scales[i]) && std::isnan(wanted.scales[i]);
    ASSERT_TRUE(got.scales[i] == wanted.scales[i] || is_nan)
        << "scale " << i << ": " << got.scales[i] << " instead of " << wanted.scales[i];
  }
}

// Any bits, and so any exponent; every fifth group has numbers of one size, as real rows do.
template <typename Element, typename Bits>
std::vector<Element> random_rows(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<Element> x;
  for (int64_t i = 0; i < count; ++i) {
    const auto any = std::bit_cast<Element>(static_cast<Bits>(random()));
    const Element drawn = from_float<Element>(normal(random));
    x.push_back(i / 128 % 5 == 0 && std::isfinite(to_float(any)) ? any : drawn);
  }
  return x;
}

TEST(QuantiseRows, HasTheBitsOfTheReferenceForEveryBf16Value) {
  constexpr int64_t kWidth = 5;
  std::vector<BF16> x;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BF16 value{static_cast<uint16_t>(bits)};
    const float size = std::abs(to_float(value));
    // The largest of its group, the smallest, and one of several sizes.
    for (const float factor : {0.37f, -0.006f, 0.0021f, static_cast<float>(bits % 3)}) {
      const float other = factor * size;
      x.push_back(std::isfinite(other) ? to_bf16(other) : BF16{0});
    }
    x.push_back(value);
  }
  for (const Format& format : kFormats) expect_reference(x, kWidth, format);
}

TEST(QuantiseRows, HasTheBitsOfTheReferenceForEveryTypeAndWidth) {
  for (const int64_t D : {1, 2, 31, 32, 33, 127, 128, 129, 300, 2880}) {
    const int64_t count = D * std::max<int64_t>(3, 2000 / D);
    for (const Format& format : kFormats) {
      expect_reference(random_rows<float, uint32_t>(count, 1), D, format);
      expect_reference(random_rows<BF16, uint16_t>(count, 2), D, format);
      expect_reference(random_rows<F16, uint16_t>(count, 3), D, format);
    }
  }
}

TEST(QuantiseRows, RoundsToNearestEvenBetweenAllNeighbours) {
  std::vector<float> x;
  std::vector<uint8_t> wanted;
  const auto add = [&](float value, uint32_t bits) {
    for (const float v : {448.0f, value, -value}) x.push_back(v);  // 448: the scale is 1
    for (const uint32_t b : {0x7eu, bits, bits | 0x80u}) {
      wanted.push_back(static_cast<uint8_t>(b));
    }
  };
  for (uint32_t bits = 0; bits < 0x7e; ++bits) {
    const float below = to_float(F8E4M3{static_cast<uint8_t>(bits)});
    const float above = to_float(F8E4M3{static_cast<uint8_t>(bits + 1)});
    const float middle = (below + above) / 2.0f;
    add(below, bits);
    add(std::nextafter(middle, 0.0f), bits);
    add(middle, bits % 2 == 0 ? bits : bits + 1);
    add(std::nextafter(middle, 448.0f), bits + 1);
  }
  const Quantised got = quantise(x, 3, {});
  for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(got.values[i].bits, wanted[i]) << x[i];
  for (const float scale : got.scales) ASSERT_EQ(scale, 1.0f);
}

TEST(QuantiseRows, ScalesAreRightAtEveryExponentEdge) {
  std::vector<float> x;
  for (int exponent = -149; exponent < 128; ++exponent) {
    for (const float factor : {1.0f, 1.75f}) {
      const float edge = std::ldexp(factor, exponent);
      for (const float value : {std::nextafter(edge, 0.0f), edge, std::nextafter(edge, 1e38f)}) {
        x.push_back(-value);
      }
    }
  }
  for (const Format& format : kFormats) expect_reference(x, 1, format);
}

TEST(QuantiseRows, WorkedScales) {
  const std::vector<float> x = {448.0f,  std::nextafter(448.0f, 500.0f), 1.0f, 0.0f, 0x1p-149f,
                                0x1p127f};
  EXPECT_THAT(quantise(x, 1, {}).scales,
              ElementsAre(1.0f, 2.0f, 0x1p-8f, 1.0f, 0x1p-126f, 0x1p119f));
  EXPECT_THAT(quantise(x, 1, {.scales = DType::kE8M0}).scales,
              ElementsAre(1.0f, 2.0f, 0x1p-8f, 1.0f, 0x1p-126f, 0x1p119f));
  EXPECT_THAT(quantise(x, 1, {.amax_floor = 896.0f}).scales,
              ElementsAre(2.0f, 2.0f, 2.0f, 2.0f, 2.0f, 0x1p119f));
  EXPECT_THAT(
      quantise(std::vector<float>{896.0f, 0.0f, 1e-44f}, 1, {.scale = Fp8Scale::kExact}).scales,
      ElementsAre(2.0f, 1.0f, 0x1p-126f));
}

TEST(QuantiseRows, StoresScalesOf32ValuesAsExponents) {
  const std::vector<BF16> x = {to_bf16(448.0f), to_bf16(1.0f), to_bf16(0.0f), BF16{0x7fc0}};
  std::vector<F8E4M3> values(4);
  std::vector<E8M0> scales(4);
  quantise_rows({.x = {x.data(), {4, 1}},
                 .values = {values.data(), {4, 1}},
                 .scales = {scales.data(), {4, 1}}});
  const uint8_t bytes[] = {127, 127 - 8, 127, 0xff};
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(scales[i].bits, bytes[i]) << i;
}

TEST(QuantiseRows, KeepsValuesBesideNanAndInfinity) {
  for (const Format& format : kFormats) {
    const Quantised got =
        quantise(std::vector<float>{-kNan, 3.0f, 500.0f, 7.0f, kInfinity, -kInfinity}, 3, format);
    EXPECT_TRUE(std::isnan(got.scales[0]) && std::isnan(got.scales[1]));
    const uint8_t wanted[] = {0x7f, 0x44, 0x7e, 0x4e, 0x7e, 0xfe};
    for (size_t i = 0; i < 6; ++i) EXPECT_EQ(got.values[i].bits, wanted[i]) << i;
  }
}

TEST(QuantiseRows, AGroupDoesNotDependOnItsNeighboursOrOnThreads) {
  const int64_t D = 1000;
  const std::vector<BF16> x = random_rows<BF16, uint16_t>(700 * D, 5);
  ThreadPool one(1);
  ThreadPool three(3);
  const Quantised all = quantise(x, D, {}, &three);
  const Quantised same = quantise(x, D, {}, &one);
  const std::vector<BF16> part(x.begin() + 300 * D, x.begin() + 301 * D);
  const Quantised alone = quantise(part, D, {}, &one);
  for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(all.values[i].bits, same.values[i].bits);
  for (size_t i = 0; i < part.size(); ++i) {
    ASSERT_EQ(alone.values[i].bits, all.values[300 * size_t{D} + i].bits);
  }
}

TEST(QuantiseRows, DequantisedRowsDifferByLessThanHalfAStep) {
  const int64_t D = 640;
  const std::vector<float> x = random_rows<float, uint32_t>(50 * D, 9);
  for (const Format& format : {kFormats[0], kFormats[2]}) {
    const Quantised rows = quantise(x, D, format);
    std::vector<float> back(x.size());
    dequantise_rows({.values = {rows.values.data(), {50, D}},
                     .scales = {rows.scales.data(), {50, D / 128}},
                     .out = {back.data(), {50, D}}});
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::abs(x[i]) >= 0x1.fp127f) continue;  // is rounded to 2^128, infinite in fp32
      const double scale = rows.scales[i / 128];
      const double limit = std::max(std::abs(double{x[i]}) / 16.0, scale * 0x1p-10) * 1.000001;
      ASSERT_LE(std::abs(double{back[i]} - double{x[i]}), limit) << x[i];
    }
  }
}

// ---- Refusals ----

std::string refusal_of_quantise(const QuantiseRowsArgs& args) {
  try {
    quantise_rows(args);
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}

TEST(QuantiseRows, RefusesWhatItCannotDo) {
  const std::vector<float> x(256);
  const std::vector<double> x64(256);
  std::vector<F8E4M3> values(256);
  std::vector<float> scales(4);
  std::vector<E8M0> bytes(8);
  const Shape shape{2, 128};
  const QuantiseRowsArgs valid{
      .x = {x.data(), shape}, .values = {values.data(), shape}, .scales = {scales.data(), {2, 1}}};
  EXPECT_EQ(refusal_of_quantise(valid), "nothing");
  const auto with = [&](auto change) {
    QuantiseRowsArgs args = valid;
    change(args);
    return refusal_of_quantise(args);
  };
  EXPECT_EQ(with([&](auto& a) {
              a.x = {x64.data(), shape};
            }),
            "x must be fp32, bf16 or fp16, got fp64");
  EXPECT_EQ(with([&](auto& a) { a.x = {x.data(), {256}}; }), "x must have 2 dimensions, got [256]");
  EXPECT_EQ(with([&](auto& a) {
              a.values = {values.data(), {1, 256}};
            }),
            "values must be [2, 128] fp8_e4m3, got [1, 256] fp8_e4m3");
  EXPECT_EQ(with([&](auto& a) {
              a.scales = {bytes.data(), {2, 2}};
            }),
            "scales must be [2, 4] e8m0, got [2, 2] e8m0");
  EXPECT_EQ(with([&](auto& a) {
              a.scales = {bytes.data(), {2, 4}};
              a.scale = Fp8Scale::kExact;
            }),
            "e8m0 scales are powers of two: with them, scale must be \"pow2\"");
  EXPECT_EQ(with([](auto& a) { a.amax_floor = -1.0f; }),
            "amax_floor must be finite and not negative, got -1");
  EXPECT_EQ(with([](auto& a) { a.amax_floor = kNan; }),
            "amax_floor must be finite and not negative, got nan");
  EXPECT_EQ(with([&](auto& a) {
              a.values = {const_cast<float*>(x.data()), DType::kF8E4M3, shape};
            }),
            "values overlaps x; outputs must have memory of their own");
  EXPECT_EQ(with([](auto& a) { a.values.data = nullptr; }),
            "values of shape [2, 128] must have memory, got a null pointer");
}

TEST(QuantiseRows, EmptyRowsMayBeNull) {
  quantise_rows({.x = {nullptr, DType::kBF16, {0, 200}},
                 .values = {nullptr, DType::kF8E4M3, {0, 200}},
                 .scales = {nullptr, DType::kF32, {0, 2}}});
  dequantise_rows({.values = {nullptr, DType::kF8E4M3, {0, 200}},
                   .scales = {nullptr, DType::kF32, {0, 2}},
                   .out = {nullptr, DType::kBF16, {0, 200}}});
}

TEST(QuantiseRows, ScaleNamesCanBeParsed) {
  for (const Fp8Scale scale : {Fp8Scale::kPow2, Fp8Scale::kExact}) {
    EXPECT_EQ(parse_fp8_scale(name_of(scale)), scale);
  }
  EXPECT_THROW(parse_fp8_scale("pow3"), Error);
}

// ---- Back ----

TEST(DequantiseRows, MultipliesEveryValueByTheScaleOfItsGroup) {
  const int64_t D = 300;  // the third group of 128 has 44 values
  std::vector<F8E4M3> values(2 * D);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = to_f8e4m3(static_cast<float>(i % 16) - 8.0F);
  }
  const std::vector<float> scales = {0.5F, 3.0F, 0x1p-100F, 1.0F, 7.0F, 0.1F};
  std::vector<BF16> bf16(values.size());
  std::vector<F16> fp16(values.size());
  std::vector<float> fp32(values.size());
  const Shape shape{2, D};
  for (const TensorView& out : {TensorView(bf16.data(), shape), TensorView(fp16.data(), shape),
                                TensorView(fp32.data(), shape)}) {
    dequantise_rows(
        {.values = {values.data(), shape}, .scales = {scales.data(), {2, 3}}, .out = out});
  }
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t d = 0; d < D; ++d) {
      const auto i = static_cast<size_t>(r * D + d);
      const float wanted = to_float(values[i]) * scales[static_cast<size_t>(r * 3 + d / 128)];
      EXPECT_EQ(bf16[i].bits, to_bf16(wanted).bits) << "row " << r << " value " << d;
      EXPECT_EQ(fp16[i].bits, to_f16(wanted).bits) << "row " << r << " value " << d;
      EXPECT_EQ(fp32[i], wanted) << "row " << r << " value " << d;
    }
  }
}

TEST(DequantiseRows, TakesPowersOfTwoPer32Values) {
  const int64_t D = 40;
  const std::vector<F8E4M3> values(D, to_f8e4m3(1.5F));
  const std::vector<E8M0> scales = {{127 + 3}, {0xff}};
  std::vector<BF16> out(values.size());
  dequantise_rows({.values = {values.data(), {1, D}},
                   .scales = {scales.data(), {1, 2}},
                   .out = {out.data(), {1, D}}});
  EXPECT_EQ(to_float(out[31]), 12.0F);
  EXPECT_EQ(out[32].bits, 0x7fc0);  // one NaN on all machines
}

TEST(DequantiseRows, RefusesScalesOfTheWrongShapeAndOverlap) {
  std::vector<BF16> out(128);
  const std::vector<F8E4M3> values(128);
  const std::vector<float> scales(2);
  try {
    dequantise_rows({.values = {values.data(), {1, 128}},
                     .scales = {scales.data(), {1, 2}},
                     .out = {out.data(), {1, 128}}});
    FAIL() << "must throw";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "scales must be [1, 1] fp32, got [1, 2] fp32");
  }
  EXPECT_THROW(dequantise_rows({.values = {out.data(), DType::kF8E4M3, {1, 64}},
                                .scales = {scales.data(), {1, 1}},
                                .out = {out.data(), {1, 64}}}),
               Error);
}

}  // namespace
}  // namespace crossdock
