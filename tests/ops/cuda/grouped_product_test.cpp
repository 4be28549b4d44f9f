// Grouped products on a GPU against those on the CPU: exact, because the operands are small whole
// numbers. Memory that must not be read, and outputs, are initialised with NaN.

#include "ops/cuda/grouped_product.hpp"

#include <gtest/gtest.h>

#include <string>

#include "ops/activation.hpp"
#include "ops/cuda/product_case.hpp"

namespace crossdock::ops {
namespace {

// Kernels and dtype.
using Form = std::pair<ProductKernels, DType>;

std::string name_of_form(const ::testing::TestParamInfo<Form>& info) {
  return std::string(info.param.first == ProductKernels::kPlain ? "plain_" : "fastest_") +
         std::string(name_of(info.param.second));
}

class CudaProduct : public CudaTest, public ::testing::WithParamInterface<Form> {
 protected:
  static ProductKernels kernels() { return GetParam().first; }
  static DType dtype() { return GetParam().second; }

  static void expect_all_match(const ProductShape& shape) {
    SCOPED_TRACE(::testing::Message()
                 << "E " << shape.counts.size() << " N " << shape.N << " K " << shape.K
                 << " alignment " << shape.alignment << " tail " << shape.tail_rows);
    const ProductCase test(shape);
    DeviceProducts gpu(test, kernels());
    expect_same("forward", gpu.forward(dtype()), rounded(test.forward(false), dtype()));
    expect_same("forward with bias", gpu.forward(dtype(), true),
                rounded(test.forward(true), dtype()));
    expect_same("forward in fp32", gpu.forward(DType::kF32, true), test.forward(true));
    expect_same("dX", gpu.dx(dtype()), rounded(test.dx(), dtype()));
    expect_same("dX in fp32", gpu.dx(DType::kF32), test.dx());
    const std::vector<float> dw = test.dw();
    expect_same("dW", gpu.dw(dtype()), rounded(dw, dtype()));
    expect_same("dW in fp32", gpu.dw(DType::kF32), dw);
    const std::vector<float> ones(dw.size(), 1.0F);
    std::vector<float> sums = ones;
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += dw[i];
    expect_same("dW added", gpu.dw(ones), sums);
  }
};

INSTANTIATE_TEST_SUITE_P(All, CudaProduct,
                         ::testing::Values(Form{ProductKernels::kFastest, DType::kBF16},
                                           Form{ProductKernels::kFastest, DType::kF16},
                                           Form{ProductKernels::kPlain, DType::kBF16},
                                           Form{ProductKernels::kPlain, DType::kF16},
                                           Form{ProductKernels::kPlain, DType::kF32}),
                         name_of_form);

TEST_P(CudaProduct, MatchesTheCpuForRaggedRows) {
  const std::vector<std::pair<int64_t, int64_t>> widths = {{384, 256}, {520, 392}, {128, 72}};
  for (const auto& [N, K] : widths) {
    expect_all_match({.counts = ragged_counts(), .N = N, .K = K, .dtype = dtype()});
  }
}

TEST_P(CudaProduct, MatchesTheCpuWithPadRowsAndATail) {
  for (const int64_t alignment : {8, 128}) {
    expect_all_match({.counts = ragged_counts(),
                      .N = 264,
                      .K = 320,
                      .dtype = dtype(),
                      .alignment = alignment,
                      .tail_rows = 777});
  }
}

TEST_P(CudaProduct, MatchesTheCpuForEveryWidth) {
  for (const int64_t N : {8, 16, 72, 100, 200}) {
    for (const int64_t K : {8, 16, 72, 100, 200}) {
      expect_all_match(
          {.counts = {5, 0, 130, 64, 1}, .N = N, .K = K, .dtype = dtype(), .tail_rows = 3});
    }
  }
  expect_all_match({.counts = {5, 0, 130}, .N = 33, .K = 7, .dtype = dtype(), .tail_rows = 3});
}

TEST_P(CudaProduct, MatchesTheCpuForEveryNumberOfExperts) {
  for (const int64_t E : {1, 3, 64, 300, 1100}) {
    expect_all_match({.counts = random_counts(E, 20, 7),
                      .N = 72,
                      .K = 136,
                      .dtype = dtype(),
                      .alignment = E == 64 ? 16 : 1,
                      .tail_rows = 20});
  }
}

TEST_P(CudaProduct, MatchesTheCpuForFewAndOneSidedRows) {
  const std::vector<std::vector<int64_t>> cases = {
      {0, 0, 0}, {0, 1000, 0}, {0, 0, 1}, {1}, {63, 64, 65, 127, 128, 129}};
  for (const std::vector<int64_t>& counts : cases) {
    expect_all_match({.counts = counts, .N = 200, .K = 136, .dtype = dtype(), .tail_rows = 9});
  }
}

TEST_P(CudaProduct, AcceptsNoRowsAndNoExperts) {
  expect_all_match({.counts = {0, 0}, .N = 16, .K = 8, .dtype = dtype()});
  const ProductCase test({.counts = {}, .N = 16, .K = 8, .dtype = dtype(), .tail_rows = 4});
  DeviceProducts gpu(test, kernels());
  expect_same("forward", gpu.forward(dtype()), std::vector<float>(4 * 16, 0.0F));
  expect_same("dX", gpu.dx(dtype()), std::vector<float>(4 * 8, 0.0F));
}

TEST_P(CudaProduct, ReadsTensorsAtAnyAddress) {
  const ProductCase test({.counts = {100, 0, 33}, .N = 64, .K = 128, .dtype = dtype()});
  DeviceProducts gpu(test, kernels());
  const OwnedTensor padded = gpu.make(dtype(), {test.R * 128 + 1});
  auto* const data = static_cast<std::byte*>(padded.view.data) + size_of(dtype());
  cuda_ok(cudaMemcpyAsync(data, gpu.x.view.data, static_cast<size_t>(gpu.x.view.num_bytes()),
                          cudaMemcpyDeviceToDevice, gpu.stream.get()));
  const OwnedTensor out = gpu.make(dtype(), {test.R, 64});
  ProductForwardArgs args = gpu.forward_args();
  args.x = ConstTensorView(data, dtype(), {test.R, 128}, kGpu);
  args.out = out.view;
  gpu.products.forward(args, gpu.stream.view());
  expect_same("forward", gpu.download(out), rounded(test.forward(false), dtype()));
}

TEST_P(CudaProduct, LeavesUnusedRowsAloneOnRequest) {
  const ProductCase test(
      {.counts = {70, 3}, .N = 64, .K = 64, .dtype = dtype(), .alignment = 128, .tail_rows = 5});
  DeviceProducts gpu(test, kernels());
  const OwnedTensor out = gpu.make(dtype(), {test.R, 64});  // NaN
  ProductForwardArgs args = gpu.forward_args();
  args.out = out.view;
  args.zero_unused_rows = false;
  gpu.products.forward(args, gpu.stream.view());
  const std::vector<float> got = gpu.download(out);
  for (int64_t row = 0; row < test.R; ++row) {
    const bool is_used = row < 70 || (row >= 128 && row < 131);
    EXPECT_EQ(std::isnan(got[static_cast<size_t>(row * 64)]), !is_used) << row;
  }
}

TEST_P(CudaProduct, KeepsNanWithinItsRowAndItsExpert) {
  ProductCase test({.counts = {200, 90, 150}, .N = 136, .K = 200, .dtype = dtype()});
  const int64_t row = 200 + 89;  // the last one of expert 1
  test.x[static_cast<size_t>(row * 200 + 7)] = kNaN;
  test.grad[static_cast<size_t>(row * 136 + 5)] = kNaN;
  DeviceProducts gpu(test, kernels());
  expect_same("forward", gpu.forward(dtype()), rounded(test.forward(false), dtype()));
  expect_same("dX", gpu.dx(dtype()), rounded(test.dx(), dtype()));
  expect_same("dW", gpu.dw(dtype()), rounded(test.dw(), dtype()));
  expect_same("dW in fp32", gpu.dw(DType::kF32), test.dw());
}

float activation_tolerance(DType dtype) {
  return dtype == DType::kF32 ? 1e-6F : dtype == DType::kF16 ? 1e-3F : 8e-3F;
}

struct GatedForm {
  int64_t N;
  bool interleaved;
  bool with_bias;
};

void expect_swiglu_matches(const GatedForm& form, ProductKernels kernels, DType dtype) {
  const ProductCase test({.counts = {162, 0, 300, 83},
                          .N = form.N,
                          .K = 136,
                          .dtype = dtype,
                          .alignment = 16,
                          .tail_rows = 21});
  DeviceProducts gpu(test, kernels);
  const int64_t F = form.N / 2;
  const std::vector<float> hidden = rounded(test.forward(form.with_bias), dtype);
  std::vector<float> wanted(static_cast<size_t>(test.R * F));
  const ActivationSpec spec{Activation::kSwiglu, form.interleaved, 0.0, F};
  for (int64_t row = 0; row < test.R; ++row) {
    activate(spec, &hidden[static_cast<size_t>(row * form.N)],
             &wanted[static_cast<size_t>(row * F)]);
  }

  const OwnedTensor out = gpu.make(dtype, {test.R, F});
  ProductForwardArgs args = gpu.forward_args();
  if (form.with_bias) args.bias = gpu.bias.view;
  args.out = out.view;
  args.epilogue = ProductEpilogue::kSwiglu;
  args.interleaved = form.interleaved;
  gpu.products.forward(args, gpu.stream.view());
  const std::vector<float> got = gpu.download(out);
  expect_close("activation", got, wanted, activation_tolerance(dtype));

  const OwnedTensor again = gpu.make(dtype, {test.R, F});
  const OwnedTensor kept = gpu.make(dtype, {test.R, form.N});
  args.out = again.view;
  args.hidden = kept.view;
  args.epilogue = ProductEpilogue::kSwigluKeepHidden;
  gpu.products.forward(args, gpu.stream.view());
  expect_same("activation, with the product kept", gpu.download(again), got);
  const std::vector<float> got_hidden = gpu.download(kept);
  for (size_t e = 0; e < test.shape().counts.size(); ++e) {
    const auto begin = test.starts[e] * form.N;
    const auto end = begin + test.shape().counts[e] * form.N;
    expect_same("product", {got_hidden.begin() + begin, got_hidden.begin() + end},
                {hidden.begin() + begin, hidden.begin() + end});
  }
}

TEST_P(CudaProduct, WithSwigluMatchesTheCpu) {
  for (const int64_t N : {16, 50, 144, 400, 528}) {
    for (const bool interleaved : {false, true}) {
      for (const bool with_bias : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "N " << N << " interleaved " << interleaved << " bias " << with_bias);
        expect_swiglu_matches({N, interleaved, with_bias}, kernels(), dtype());
      }
    }
  }
}

TEST_P(CudaProduct, RoundsOnceForRealNumbers) {
  const ProductCase test(
      {.counts = ragged_counts(), .N = 384, .K = 512, .dtype = dtype(), .whole_numbers = false});
  DeviceProducts gpu(test, kernels());
  const float tolerance = dtype() == DType::kF32 ? 1e-5F : dtype() == DType::kF16 ? 1e-3F : 8e-3F;
  expect_close("forward", gpu.forward(dtype()), test.forward(false), tolerance);
  expect_close("forward in fp32", gpu.forward(DType::kF32), test.forward(false), 1e-5F);
  expect_close("dX", gpu.dx(dtype()), test.dx(), tolerance);
  expect_close("dW", gpu.dw(dtype()), test.dw(), tolerance);
  expect_close("dW in fp32", gpu.dw(DType::kF32), test.dw(), 1e-4F);
}

// Offsets of rows and weights exceed 2^31 elements.
TEST_F(CudaTest, ProductsOfHugeTensorsMatchThoseOfTheirLastRows) {
  constexpr int64_t kRows = 140'000;
  constexpr int64_t kN = 16'384;
  const ProductShape shape{.counts = {kRows - 300, 300}, .N = kN, .K = 64};
  const ProductCase test(shape);
  DeviceProducts gpu(test, ProductKernels::kFastest);
  const OwnedTensor out = gpu.make(DType::kBF16, {kRows, kN});
  ProductForwardArgs args = gpu.forward_args();
  args.out = out.view;
  gpu.products.forward(args, gpu.stream.view());
  const auto* last = static_cast<const std::byte*>(out.view.data) + (kRows - 300) * kN * 2;
  const std::vector<float> got = decode(
      to_host(ConstTensorView(last, DType::kBF16, {300, kN}, kGpu), gpu.stream), DType::kBF16);
  ProductCase small({.counts = {300}, .N = kN, .K = 64});
  std::copy(test.x.end() - 300 * 64, test.x.end(), small.x.begin());
  std::copy(test.w.end() - kN * 64, test.w.end(), small.w.begin());
  expect_same("last rows", got, rounded(small.forward(false), DType::kBF16));
}

}  // namespace
}  // namespace crossdock::ops
