// Activations on a GPU equal those on the CPU; only rows of segments are written.
#include "ops/cuda/device_activation.hpp"

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "ops/cuda/ragged_rows.hpp"

namespace crossdock::ops {
namespace {

struct ActivationOptions {
  bool interleaved = false;
  bool with_b2 = false;
  bool with_weights = false;
  int64_t offset = 0;  // of all tensors, in elements
  bool in_place = false;
};

// Everything that the two kernels read and write.
struct ActivationCase {
  ActivationSpec spec;
  DType dtype;
  ActivationOptions options;
  int64_t D = 0;
  int64_t hidden_width = 0;
  const RaggedRows& rows;
  std::vector<double> hidden, weights, u, grad_y, b2;

  ActivationCase(const RaggedRows& rows_in, Activation kind, DType dtype_in, int64_t F,
                 const ActivationOptions& given)
      : spec{.kind = kind, .interleaved = given.interleaved, .limit = 1.5, .F = F},
        dtype(dtype_in),
        options(given),
        D(F + 3),
        hidden_width(is_gated(kind) ? 2 * F : F),
        rows(rows_in),
        hidden(draw_rows(rows, hidden_width, dtype, 1)),
        weights(draw_rows(rows, 1, DType::kF32, 3)),
        u(draw_rows(rows, F, dtype, 4)),
        grad_y(draw_rows(rows, D, dtype, 5)),
        b2(draw(rows.num_experts() * D, dtype, 6)) {}
};

struct ActivationResults {
  std::vector<double> activation, grad_hidden, weighted_activation, grad_row_weights;
  friend bool operator==(const ActivationResults&, const ActivationResults&) = default;
};

// NaN does not equal itself, so unwritten rows are replaced by a number.
std::vector<double> without_nan(std::vector<double> values) {
  std::replace_if(
      values.begin(), values.end(), [](double v) { return std::isnan(v); }, -12345.0);
  return values;
}

ActivationResults activate_on_gpu(const ActivationCase& test) {
  const RankStream stream;
  const ActivationOptions& options = test.options;
  const int64_t R = test.rows.R;
  const int64_t E_local = test.rows.num_experts();
  const int64_t F = test.spec.F;
  const auto put = [&](const std::vector<double>& values, const Shape& shape) {
    return upload(values, test.dtype, shape, stream, options.offset);
  };
  const auto unwritten = [&](const Shape& shape) {
    return put(std::vector<double>(static_cast<size_t>(shape.num_elements()), std::nan("")), shape);
  };
  const OwnedTensor hidden = put(test.hidden, {R, test.hidden_width});
  const OwnedTensor u = put(test.u, {R, F});
  const OwnedTensor grad_y = put(test.grad_y, {R, test.D});
  const OwnedTensor row_weights = upload(test.weights, DType::kF32, {R}, stream);
  const OwnedTensor grad_row_weights = upload(test.weights, DType::kF32, {R}, stream);
  const OwnedTensor activation = unwritten({R, F});
  const OwnedTensor grad_hidden = options.in_place ? hidden : unwritten({R, test.hidden_width});
  const OwnedTensor weighted = options.in_place ? u : unwritten({R, F});
  OwnedTensor b2;
  if (options.with_b2) b2 = put(test.b2, {E_local, test.D});
  const ConstTensorView weights =
      options.with_weights ? ConstTensorView(row_weights.view) : ConstTensorView();
  activate_on_device({.spec = test.spec,
                      .hidden = hidden.view,
                      .row_weights = weights,
                      .segments = test.rows.device(),
                      .activation = activation.view},
                     stream.view());
  activate_backward_on_device({.spec = test.spec,
                               .hidden = hidden.view,
                               .row_weights = weights,
                               .grad_activation = u.view,
                               .grad_y = grad_y.view,
                               .b2 = b2.view,
                               .segments = test.rows.device(),
                               .grad_hidden = grad_hidden.view,
                               .weighted_activation = weighted.view,
                               .grad_row_weights = grad_row_weights.view},
                              stream.view());
  return {without_nan(download(activation, stream)), without_nan(download(grad_hidden, stream)),
          without_nan(download(weighted, stream)), without_nan(download(grad_row_weights, stream))};
}

// The same on the CPU, row by row; rows outside the segments are handled as above.
ActivationResults activate_on_cpu(const ActivationCase& test) {
  const auto F = static_cast<size_t>(test.spec.F);
  const auto hidden_width = static_cast<size_t>(test.hidden_width);
  const auto D = static_cast<size_t>(test.D);
  const auto R = static_cast<size_t>(test.rows.R);
  const double none = -12345.0;
  ActivationResults wanted{std::vector<double>(R * F, none),
                           std::vector<double>(R * hidden_width, none),
                           std::vector<double>(R * F, none), std::vector<double>(R, none)};
  for (size_t r = 0; r < R; ++r) {
    const int64_t expert = test.rows.expert_of(static_cast<int64_t>(r));
    if (expert < 0) continue;
    const auto e = static_cast<size_t>(expert);
    const double p = test.options.with_weights ? test.weights[r] : 1.0;
    std::vector<double> h(hidden_width);
    std::vector<double> a(F);
    std::vector<double> grad_a(F);
    std::vector<double> grad_h(hidden_width);
    for (size_t i = 0; i < hidden_width; ++i) {
      h[i] = test.hidden[r * hidden_width + i];
    }
    for (size_t i = 0; i < F; ++i) grad_a[i] = p * test.u[r * F + i];
    activate(test.spec, h.data(), a.data());
    activate_backward(test.spec, h.data(), grad_a.data(), grad_h.data());
    double grad = 0.0;
    for (size_t i = 0; i < F; ++i) {
      wanted.activation[r * F + i] = p * a[i];
      wanted.weighted_activation[r * F + i] = p * a[i];
      grad += a[i] * test.u[r * F + i];
    }
    for (size_t i = 0; i < D && test.options.with_b2; ++i) {
      grad += test.b2[e * D + i] * test.grad_y[r * D + i];
    }
    std::copy(grad_h.begin(), grad_h.end(),
              wanted.grad_hidden.begin() + static_cast<std::ptrdiff_t>(r * hidden_width));
    wanted.grad_row_weights[r] = grad;
  }
  return wanted;
}

void expect_near(const char* name, const std::vector<double>& got,
                 const std::vector<double>& wanted, DType dtype, double slack) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], wanted[i], unit(dtype, wanted[i]) + slack) << name << " at " << i;
  }
}

void expect_results_of_the_cpu(const ActivationCase& test) {
  const ActivationResults got = activate_on_gpu(test);
  const ActivationResults wanted = activate_on_cpu(test);
  expect_near("activation", got.activation, wanted.activation, test.dtype, 0.0);
  expect_near("grad_hidden", got.grad_hidden, wanted.grad_hidden, test.dtype, 2e-6);
  expect_near("weighted_activation", got.weighted_activation, wanted.weighted_activation,
              test.dtype, 0.0);
  const double sums = 1e-6 * std::sqrt(static_cast<double>(test.spec.F + test.D));
  expect_near("grad_row_weights", got.grad_row_weights, wanted.grad_row_weights, DType::kF32,
              10 * sums);
}

class DeviceActivation : public CudaTest,
                         public ::testing::WithParamInterface<std::tuple<int, DType>> {};

TEST_P(DeviceActivation, IsThatOfTheCpu) {
  const auto kind = static_cast<Activation>(std::get<0>(GetParam()));
  const DType dtype = std::get<1>(GetParam());
  const RankStream stream;
  const RaggedRows rows({3, 0, 9, 1, 0}, 4, 3, stream);
  for (const int64_t F : {1, 7, 8, 20, 64, 264, 1032}) {
    for (const bool interleaved : {false, true}) {
      if (interleaved && !is_gated(kind)) continue;
      for (int mask = 0; mask < 4; ++mask) {
        const ActivationOptions options{.interleaved = interleaved,
                                        .with_b2 = (mask & 1) != 0,
                                        .with_weights = (mask & 2) != 0};
        SCOPED_TRACE(testing::Message()
                     << "F " << F << " interleaved " << interleaved << " mask " << mask);
        expect_results_of_the_cpu(ActivationCase(rows, kind, dtype, F, options));
      }
    }
  }
}

TEST_P(DeviceActivation, HasTheSameBitsInPlaceUnalignedAndInEveryRun) {
  const auto kind = static_cast<Activation>(std::get<0>(GetParam()));
  const DType dtype = std::get<1>(GetParam());
  const RankStream stream;
  const RaggedRows rows({30, 0, 9}, 4, 3, stream);
  for (const int64_t F : {5, 40, 528}) {
    for (const bool interleaved : {false, true}) {
      if (interleaved && !is_gated(kind)) continue;
      ActivationOptions options{.interleaved = interleaved, .with_b2 = true, .with_weights = true};
      const ActivationResults plain =
          activate_on_gpu(ActivationCase(rows, kind, dtype, F, options));
      EXPECT_TRUE(activate_on_gpu(ActivationCase(rows, kind, dtype, F, options)) == plain);
      options.in_place = true;
      EXPECT_TRUE(activate_on_gpu(ActivationCase(rows, kind, dtype, F, options)).grad_hidden ==
                  plain.grad_hidden);
      options.in_place = false;
      options.offset = 1;
      EXPECT_TRUE(activate_on_gpu(ActivationCase(rows, kind, dtype, F, options)) == plain);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceActivation,
                         ::testing::Combine(::testing::Range(0, 6),
                                            ::testing::Values(DType::kF32, DType::kBF16,
                                                              DType::kF16)),
                         [](const auto& info) {
                           const auto kind = static_cast<Activation>(std::get<0>(info.param));
                           return std::string(name_of(kind)) + "_" +
                                  std::string(name_of(std::get<1>(info.param)));
                         });

class DeviceActivationRows : public CudaTest {};

TEST_F(DeviceActivationRows, TakesRaggedSegments) {
  const RankStream stream;
  for (const std::vector<int64_t>& counts : ragged_counts()) {
    for (const int64_t alignment : {1, 16}) {
      const RaggedRows rows(counts, alignment, 5, stream);
      SCOPED_TRACE(testing::PrintToString(counts));
      expect_results_of_the_cpu(ActivationCase(rows, Activation::kSwiglu, DType::kBF16, 72,
                                               {.with_b2 = true, .with_weights = true}));
    }
  }
}

TEST_F(DeviceActivationRows, TakesMoreRowsThanWarps) {
  const RankStream stream;
  const RaggedRows rows({9000, 0, 1, 700}, 8, 100, stream);
  expect_results_of_the_cpu(
      ActivationCase(rows, Activation::kClampedSwiglu, DType::kF16, 16, {.interleaved = true}));
}

}  // namespace
}  // namespace crossdock::ops
