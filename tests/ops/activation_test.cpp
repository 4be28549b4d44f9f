#include "ops/activation.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace crossdock::ops {
namespace {

const std::vector<double> kInputs = {-9.0, -7.5, -3.0, -1.0, -0.25, 0.0, 0.3, 1.0, 2.5, 6.5, 8.0};

class EveryActivation : public ::testing::TestWithParam<int> {
 protected:
  ActivationSpec spec(bool interleaved, int64_t F) const {
    return {.kind = static_cast<Activation>(GetParam()), .interleaved = interleaved, .F = F};
  }
};

TEST_P(EveryActivation, HasTheGradientOfFiniteDifferences) {
  const double step = 1e-6;
  for (const bool interleaved : {false, true}) {
    for (const double gate : kInputs) {
      for (const double linear : kInputs) {
        const ActivationSpec one = spec(interleaved, 1);
        const std::vector<double> h = {gate, linear};
        const double grad_a = 1.5;
        std::vector<double> grad_h(2);
        activate_backward(one, h.data(), &grad_a, grad_h.data());
        for (int64_t i = 0; i < (is_gated(one.kind) ? 2 : 1); ++i) {
          std::vector<double> moved = h;
          double up = 0;
          double down = 0;
          moved[static_cast<size_t>(i)] += step;
          activate(one, moved.data(), &up);
          moved[static_cast<size_t>(i)] -= 2 * step;
          activate(one, moved.data(), &down);
          EXPECT_NEAR(grad_h[static_cast<size_t>(i)], grad_a * (up - down) / (2 * step), 2e-6)
              << name_of(one.kind) << " at " << gate << ", " << linear;
        }
      }
    }
  }
}

TEST_P(EveryActivation, StaysFiniteForLargeInputs) {
  for (const float x : {-1e4F, -100.0F, 100.0F, 1e4F}) {
    const std::vector<float> h = {x, 2.0F};
    const float grad_a = 1.0F;
    float a = 0;
    std::vector<float> grad_h(2);
    activate(spec(false, 1), h.data(), &a);
    activate_backward(spec(false, 1), h.data(), &grad_a, grad_h.data());
    EXPECT_TRUE(std::isfinite(a));
    EXPECT_TRUE(std::isfinite(grad_h[0]) && std::isfinite(grad_h[1]));
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryActivation,
                         ::testing::Range(0, static_cast<int>(kActivationNames.size())),
                         [](const auto& info) {
                           return std::string(name_of(static_cast<Activation>(info.param)));
                         });

TEST(Activation, ReadsInterleavedInputAsTheSameValuesInAnotherOrder) {
  const int64_t F = 5;
  for (const Activation kind : {Activation::kSwiglu, Activation::kClampedSwiglu, Activation::kGeglu,
                                Activation::kGegluTanh, Activation::kLimitedSwiglu}) {
    std::vector<float> h(2 * F);
    std::vector<float> mixed(2 * F);
    for (size_t i = 0; i < F; ++i) {
      mixed[2 * i] = h[i] = 0.5F * static_cast<float>(i) - 1.0F;
      mixed[2 * i + 1] = h[F + i] = 2.0F - static_cast<float>(i);
    }
    std::vector<float> a(F);
    std::vector<float> b(F);
    activate(ActivationSpec{.kind = kind, .F = F}, h.data(), a.data());
    activate(ActivationSpec{.kind = kind, .interleaved = true, .F = F}, mixed.data(), b.data());
    EXPECT_EQ(a, b) << name_of(kind);
  }
}

TEST(Activation, HasTheValuesOfItsFormula) {
  const auto value = [](Activation kind, std::vector<double> h) {
    double a = 0;
    activate(ActivationSpec{.kind = kind, .F = 1}, h.data(), &a);
    return a;
  };
  EXPECT_NEAR(value(Activation::kSwiglu, {1.0, 2.0}), 2.0 / (1.0 + std::exp(-1.0)), 1e-15);
  EXPECT_NEAR(value(Activation::kClampedSwiglu, {9.0, -8.0}),
              7.0 / (1.0 + std::exp(-1.702 * 7.0)) * -6.0, 1e-13);
  EXPECT_NEAR(value(Activation::kGeglu, {1.0, 3.0}), 3.0 * 0.84134474606854293, 1e-14);
  EXPECT_NEAR(value(Activation::kGelu, {-1.0}), -0.15865525393145707, 1e-15);
  EXPECT_NEAR(value(Activation::kGeluTanh, {1.0}), 0.8411919906082768, 1e-15);
  EXPECT_NEAR(value(Activation::kGegluTanh, {1.0, 3.0}), 3.0 * 0.8411919906082768, 1e-14);
  EXPECT_NEAR(value(Activation::kLimitedSwiglu, {9.0, -8.0}), 7.0 / (1.0 + std::exp(-7.0)) * -7.0,
              1e-13);
  EXPECT_EQ(value(Activation::kSquaredRelu, {3.0}), 9.0);
  EXPECT_EQ(value(Activation::kSquaredRelu, {-3.0}), 0.0);
}

}  // namespace
}  // namespace crossdock::ops
