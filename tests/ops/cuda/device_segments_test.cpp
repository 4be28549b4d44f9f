// Ragged rows on a GPU: which rows are zeroed, added and summed, and which are left unchanged.
#include <gtest/gtest.h>

#include "ops/cuda/device_rows.hpp"
#include "ops/cuda/ragged_rows.hpp"

namespace crossdock::ops {
namespace {

class DeviceSegments : public CudaTest {};

TEST_F(DeviceSegments, ZeroesTheRowsOfNoSegmentAndLeavesTheOthersAlone) {
  const RankStream stream;
  for (std::vector<int64_t> counts : ragged_counts()) {
    for (const int64_t alignment : {1, 16}) {
      for (const int64_t width : {1, 3, 8, 40}) {
        const RaggedRows rows(counts, alignment, 700, stream);
        const OwnedTensor wide = upload(std::vector<double>(static_cast<size_t>(rows.R * width), 7),
                                        DType::kBF16, {rows.R, width}, stream);
        const OwnedTensor thin = upload(std::vector<double>(static_cast<size_t>(rows.R), 5),
                                        DType::kF32, {rows.R}, stream);
        zero_unused_rows_on_device({.tensors = {wide.view, thin.view}, .segments = rows.device()},
                                   stream.view());
        const std::vector<double> got_wide = download(wide, stream);
        const std::vector<double> got_thin = download(thin, stream);
        for (int64_t r = 0; r < rows.R; ++r) {
          const bool used = rows.expert_of(r) >= 0;
          ASSERT_EQ(got_thin[static_cast<size_t>(r)], used ? 5.0 : 0.0);
          for (int64_t i = 0; i < width; ++i) {
            ASSERT_EQ(got_wide[static_cast<size_t>(r * width + i)], used ? 7.0 : 0.0);
          }
        }
      }
    }
  }
}

TEST_F(DeviceSegments, ZeroesEverythingIfThereAreNoSegments) {
  const RankStream stream;
  const RaggedRows rows({}, 1, 6, stream);
  const OwnedTensor values = upload(std::vector<double>(12, 7), DType::kF16, {6, 2}, stream);
  zero_unused_rows_on_device({.tensors = {values.view}, .segments = rows.device()}, stream.view());
  EXPECT_EQ(download(values, stream), std::vector<double>(12, 0.0));
}

TEST_F(DeviceSegments, ZeroesRowsBeforeTheFirstSegment) {
  const RankStream stream;
  RaggedRows rows({4, 2}, 4, 3, stream);  // the second segment starts at row 4
  Segments second = rows.device();
  second.starts += 1;
  second.counts += 1;
  second.num_segments = 1;
  const OwnedTensor values =
      upload(std::vector<double>(static_cast<size_t>(rows.R), 7), DType::kF32, {rows.R}, stream);
  zero_unused_rows_on_device({.tensors = {values.view}, .segments = second}, stream.view());
  EXPECT_EQ(download(values, stream), (std::vector<double>{0, 0, 0, 0, 7, 7, 0, 0, 0, 0, 0}));
}

TEST_F(DeviceSegments, AddsTheBiasTimesTheRowsWeight) {
  const RankStream stream;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType result : {dtype, DType::kF32}) {
      const int64_t D = 37;
      const RaggedRows rows({30, 0, 9, 1}, 8, 3, stream);
      const std::vector<double> before = draw_rows(rows, D, result, 1);
      const std::vector<double> weights = draw_rows(rows, 1, DType::kF32, 2);
      const std::vector<double> bias = draw(rows.num_experts() * D, dtype, 3);
      const OwnedTensor values = upload(before, result, {rows.R, D}, stream);
      const OwnedTensor row_weights = upload(weights, DType::kF32, {rows.R}, stream);
      const OwnedTensor device_bias = upload(bias, dtype, {rows.num_experts(), D}, stream);
      add_weighted_bias_on_device({.bias = device_bias.view,
                                   .row_weights = row_weights.view,
                                   .segments = rows.device(),
                                   .rows = values.view},
                                  stream.view());
      const std::vector<double> got = download(values, stream);
      for (int64_t r = 0; r < rows.R; ++r) {
        const int64_t expert = rows.expert_of(r);
        for (int64_t d = 0; d < D; ++d) {
          const auto at = static_cast<size_t>(r * D + d);
          if (expert < 0) {
            ASSERT_TRUE(std::isnan(got[at]));
            continue;
          }
          const double wanted = before[at] + weights[static_cast<size_t>(r)] *
                                                 bias[static_cast<size_t>(expert * D + d)];
          ASSERT_NEAR(got[at], wanted, unit(result, wanted));
        }
      }
    }
  }
}

struct SumOptions {
  bool with_weights = false;
  bool accumulate = false;
  double initial = std::nan("");
  int64_t offset = 0;
};

std::vector<double> sum_on_gpu(const RaggedRows& rows, int64_t width, DType dtype,
                               const SumOptions& options) {
  const RankStream stream;
  const OwnedTensor values =
      upload(draw_rows(rows, width, dtype, 1), dtype, {rows.R, width}, stream, options.offset);
  const OwnedTensor weights =
      upload(draw_rows(rows, 1, DType::kF32, 2), DType::kF32, {rows.R}, stream);
  const Shape shape{rows.num_experts(), width};
  const OwnedTensor sums =
      upload(std::vector<double>(static_cast<size_t>(shape.num_elements()), options.initial),
             DType::kF32, shape, stream);
  sum_segments_on_device(
      {.rows = values.view,
       .row_weights = options.with_weights ? ConstTensorView(weights.view) : ConstTensorView(),
       .segments = rows.device(),
       .sums = sums.view,
       .accumulate = options.accumulate},
      stream.view());
  return download(sums, stream);
}

void expect_sums(const RaggedRows& rows, int64_t width, DType dtype, const SumOptions& options) {
  const std::vector<double> got = sum_on_gpu(rows, width, dtype, options);
  const std::vector<double> values = draw_rows(rows, width, dtype, 1);
  const std::vector<double> weights = draw_rows(rows, 1, DType::kF32, 2);
  for (int64_t e = 0; e < rows.num_experts(); ++e) {
    const auto at = static_cast<size_t>(e);
    for (int64_t i = 0; i < width; ++i) {
      double sum = options.accumulate ? options.initial : 0.0;
      double size = std::abs(sum);
      for (int64_t r = rows.starts[at]; r < rows.starts[at] + rows.counts[at]; ++r) {
        const double p = options.with_weights ? weights[static_cast<size_t>(r)] : 1.0;
        const double term = p * values[static_cast<size_t>(r * width + i)];
        sum += term;
        size += std::abs(term);
      }
      const double result = got[static_cast<size_t>(e * width + i)];
      ASSERT_NEAR(result, sum, 1e-6 * size) << "expert " << e << " column " << i;
      if (rows.counts[at] == 0) {
        ASSERT_EQ(result, options.accumulate ? options.initial : 0.0);
      }
    }
  }
}

TEST_F(DeviceSegments, SumsTheRowsOfEverySegment) {
  const RankStream stream;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::vector<int64_t>& counts : ragged_counts()) {
      const RaggedRows rows(counts, 4, 3, stream);
      for (const int64_t width : {1, 7, 8, 63, 64, 72, 200}) {
        SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << testing::PrintToString(counts)
                                        << " width " << width);
        expect_sums(rows, width, dtype, {});
        expect_sums(rows, width, dtype, {.with_weights = true});
        expect_sums(rows, width, dtype,
                    {.with_weights = true, .accumulate = true, .initial = 0.75});
      }
    }
  }
}

TEST_F(DeviceSegments, SumsHaveTheSameBitsUnalignedElsewhereAndInEveryRun) {
  const RankStream stream;
  const RaggedRows rows({162, 0, 2577, 446, 0, 83}, 8, 3, stream);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::vector<double> once = sum_on_gpu(rows, 72, dtype, {.with_weights = true});
    EXPECT_EQ(sum_on_gpu(rows, 72, dtype, {.with_weights = true}), once);
    EXPECT_EQ(sum_on_gpu(rows, 72, dtype, {.with_weights = true, .offset = 1}), once);
  }
}

TEST_F(DeviceSegments, AnEmptySegmentKeepsItsBitsWhenSumsAreAdded) {
  const RankStream stream;
  const RaggedRows rows({5, 0, 2}, 1, 0, stream);
  const std::vector<double> got =
      sum_on_gpu(rows, 9, DType::kBF16, {.accumulate = true, .initial = -0.0});
  for (size_t i = 9; i < 18; ++i) EXPECT_TRUE(std::signbit(got[i]));
}

}  // namespace
}  // namespace crossdock::ops
