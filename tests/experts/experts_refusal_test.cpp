// Configurations and arguments that experts refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "crossdock/cuda.hpp"
#include "crossdock/error.hpp"
#include "crossdock/experts.hpp"

namespace crossdock {
namespace {

auto refusal(const std::string& words) {
  return testing::ThrowsMessage<Error>(testing::HasSubstr(words));
}

// One expert of width 4 and inner width 3, with 2 rows.
struct SmallExperts {
  Experts experts{{.num_local_experts = 1, .width = 4, .inner = 3}};
  std::vector<float> x = std::vector<float>(2 * 4);
  std::vector<float> w1 = std::vector<float>(6 * 4);
  std::vector<float> w2 = std::vector<float>(4 * 3);
  std::vector<float> y = std::vector<float>(2 * 4);
  OneSegment all{2};

  ExpertsForwardArgs forward_args() {
    return {.weights = {{w1.data(), {1, 6, 4}}, {w2.data(), {1, 4, 3}}, {}, {}},
            .rows = {x.data(), {2, 4}},
            .segments = all.view(),
            .row_weights = {},
            .y = {y.data(), {2, 4}}};
  }
};

TEST(Experts, RefuseInvalidConfigurations) {
  EXPECT_THROW(Experts({.num_local_experts = 1, .width = 0, .inner = 3}), Error);
  EXPECT_THROW(
      Experts({.width = 4, .inner = 3, .activation = Activation::kGelu, .interleaved = true}),
      Error);
  EXPECT_THROW(Experts({.width = 4, .inner = 3, .dtype = DType::kF8E4M3}), Error);
}

TEST(Experts, RefuseWeightsAndSegmentsOfTheWrongShape) {
  SmallExperts small;
  ExpertsForwardArgs args = small.forward_args();
  const auto forward = [&] { small.experts.forward(args); };
  const OneSegment three(3);
  args.segments = three.view();
  EXPECT_THAT(forward, refusal("must end within the 2 rows"));
  args.segments = small.all.view();
  args.weights.w1 = {small.w1.data(), {1, 4, 6}};
  EXPECT_THAT(forward, refusal("w1 must be [1, 6, 4] fp32, got [1, 4, 6] fp32"));
  args.weights.w1 = {};
  EXPECT_THAT(forward, refusal("w1 must be [1, 6, 4] fp32, got nothing"));

  const Experts two({.num_local_experts = 2, .width = 4, .inner = 3});
  const int64_t starts[] = {0, 1, 2};
  const int64_t counts[] = {2, 1};
  args.segments = {.starts = starts, .counts = counts, .num_segments = 2, .device = {}};
  EXPECT_THAT([&] { two.forward(args); },
              refusal("segment 1 must start at row 2 or later, have a count of at least 0 and end "
                      "at row 2^60 at most, got start 1"));
  const int64_t far_starts[] = {0, 2, 2};
  const int64_t far_counts[] = {2, std::numeric_limits<int64_t>::max()};
  args.segments = {.starts = far_starts, .counts = far_counts, .num_segments = 2, .device = {}};
  EXPECT_THAT([&] { two.forward(args); }, refusal("end at row 2^60 at most, got start 2"));
}

TEST(Experts, RefuseTransposedWeightsOnAGpu) {
  const Experts experts({.num_local_experts = 1, .width = 4, .inner = 3, .transposed = true});
  SmallExperts small;
  ExpertsForwardArgs args = small.forward_args();
  args.rows.device = {DeviceKind::kCuda, 0};
  EXPECT_THAT([&] { experts.forward(args); }, refusal("transposed weights are supported in host"));
  // Layers prepare before the ranks agree: a refusal afterwards would poison their group.
  EXPECT_THAT([&] { experts.prepare(args.rows.device); },
              refusal("transposed weights are supported in host"));
  EXPECT_NO_THROW(experts.prepare(Device{}));
}

TEST(Experts, RefuseOutputsThatOverlapInputs) {
  SmallExperts small;
  const Experts& experts = small.experts;
  ExpertsForwardArgs forward = small.forward_args();
  forward.y = TensorView(small.x.data(), {2, 4});
  EXPECT_THAT([&] { experts.forward(forward); }, refusal("y overlaps rows"));
  forward.y = TensorView(small.w1.data() + 16, {2, 4});
  EXPECT_THAT([&] { experts.forward(forward); }, refusal("y overlaps w1"));
  ExpertsSaved saved = experts.forward(small.forward_args());

  std::vector<float> grad_rows(2 * 4);
  std::vector<float> row_weights(2);
  ExpertsBackwardDxArgs dx{.weights = forward.weights,
                           .rows = forward.rows,
                           .segments = forward.segments,
                           .row_weights = {row_weights.data(), {2}},
                           .grad_y = {small.y.data(), {2, 4}},
                           .saved = &saved,
                           .grad_rows = {small.y.data(), {2, 4}}};
  EXPECT_THAT([&] { experts.backward_dx(dx); }, refusal("grad_rows overlaps grad_y"));
  dx.grad_rows = TensorView(grad_rows.data(), {2, 4});
  dx.grad_row_weights = TensorView(grad_rows.data() + 6, {2});
  EXPECT_THAT([&] { experts.backward_dx(dx); }, refusal("grad_row_weights overlaps grad_rows"));
  dx.grad_row_weights = {};
  experts.backward_dx(dx);

  const ExpertsBackwardDwArgs dw{.rows = dx.rows,
                                 .segments = dx.segments,
                                 .row_weights = dx.row_weights,
                                 .grad_y = dx.grad_y,
                                 .saved = &saved,
                                 .grads = {.b2 = {small.y.data() + 4, {1, 4}}}};
  EXPECT_THAT([&] { experts.backward_dw(dw); }, refusal("grad of b2 overlaps grad_y"));
}

TEST(Experts, RefuseValuesSavedByOtherExperts) {
  SmallExperts small;
  std::vector<float> grad_y(2 * 4);
  std::vector<float> grad_rows(2 * 4);
  const auto backward_dx = [&](const ExpertsConfig& config, ExpertsSaved saved) {
    const ExpertsForwardArgs forward = small.forward_args();
    Experts(config).backward_dx({.weights = forward.weights,
                                 .rows = forward.rows,
                                 .segments = forward.segments,
                                 .row_weights = {},
                                 .grad_y = {grad_y.data(), {2, 4}},
                                 .saved = &saved,
                                 .grad_rows = {grad_rows.data(), {2, 4}}});
  };
  const auto saved = [&] { return small.experts.forward(small.forward_args()); };
  const ExpertsConfig config = small.experts.config();
  EXPECT_NO_THROW(backward_dx(config, saved()));
  ExpertsConfig other = config;
  other.recompute = true;
  EXPECT_NO_THROW(backward_dx(other, saved()));
  other = config;
  other.activation = Activation::kGeglu;
  EXPECT_THAT([&] { backward_dx(other, saved()); },
              refusal("saved must come from experts with "
                      "num_local_experts=1;width=4;inner=3;activation=geglu;"));
  other = config;
  other.interleaved = true;
  EXPECT_THAT([&] { backward_dx(other, saved()); }, refusal("interleaved=1;"));

  // More rows than the backward has.
  std::vector<float> x(3 * 4);
  std::vector<float> y(3 * 4);
  const OneSegment three(3);
  ExpertsForwardArgs longer = small.forward_args();
  longer.rows = {x.data(), {3, 4}};
  longer.y = {y.data(), {3, 4}};
  longer.segments = three.view();
  EXPECT_THAT([&] { backward_dx(config, small.experts.forward(longer)); },
              refusal("48 bytes of hidden rows in host memory, got 72 in host memory"));
}

TEST(Experts, RefuseGradientsOfValuesSavedByOtherExperts) {
  SmallExperts small;
  const ExpertsForwardArgs forward = small.forward_args();
  ExpertsSaved saved = small.experts.forward(forward);
  const std::vector<float> grad_y(2 * 4);
  std::vector<float> grad_rows(2 * 4);
  small.experts.backward_dx({.weights = forward.weights,
                             .rows = forward.rows,
                             .segments = forward.segments,
                             .row_weights = {},
                             .grad_y = {grad_y.data(), {2, 4}},
                             .saved = &saved,
                             .grad_rows = {grad_rows.data(), {2, 4}}});
  ExpertsConfig other = small.experts.config();
  const auto backward_dw = [&] {
    Experts(other).backward_dw({.rows = forward.rows,
                                .segments = forward.segments,
                                .row_weights = {},
                                .grad_y = {grad_y.data(), {2, 4}},
                                .saved = &saved});
  };
  EXPECT_NO_THROW(backward_dw());
  other.activation = Activation::kGeglu;
  EXPECT_THAT(backward_dw, refusal("saved must come from experts with"));
}

TEST(Experts, RefuseSizesThatCannotBeCounted) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  EXPECT_THAT([&] { Experts({.width = kMost + 1, .inner = 3}); },
              refusal("width must be in [1, 2147483647], got 2147483648"));
  EXPECT_THAT([&] { Experts({.width = 4, .inner = kMost + 1}); },
              refusal("inner must be in [1, 2147483647], got 2147483648"));
  EXPECT_THAT([&] { Experts({.width = 4, .inner = int64_t{1} << 62}); },
              refusal("inner must be in [1, 2147483647], got 4611686018427387904"));

  // Views larger than their memory: the call is refused before it reads any.
  const Experts experts({.num_local_experts = 1, .width = 1, .inner = kMost});
  float value = 0;
  constexpr int64_t kRows = int64_t{1} << 40;
  const OneSegment all(kRows);
  const ExpertsForwardArgs args{
      .weights = {{&value, {1, 2 * kMost, 1}}, {&value, {1, 1, kMost}}, {}, {}},
      .rows = {&value, {kRows, 1}},
      .segments = all.view(),
      .row_weights = {},
      .y = {&value, {kRows, 1}}};
  EXPECT_THAT([&] { experts.forward(args); },
              refusal("1099511627776 rows of inner width 2147483647 are more than can be counted"));
}

// Views that claim to be on a GPU. The calls are refused before the memory is used.
TEST(Experts, RefuseTensorsOnSeveralDevices) {
  SmallExperts small;
  const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
  ExpertsForwardArgs args = small.forward_args();
  const auto forward = [&] { small.experts.forward(args); };
  args.weights.w1.device = gpu;
  EXPECT_THAT(forward, refusal("w1 must be in host memory"));
  args = small.forward_args();
  args.segments.device = gpu;
  EXPECT_THAT(forward,
              refusal("the rows are in host memory, so segments must be there too, not on GPU 0"));
  args = small.forward_args();
  args.rows.device = gpu;
  EXPECT_THAT(forward, refusal("y must be on GPU 0, it is in host memory"));
  args.y.device = gpu;
  EXPECT_THAT(forward,
              refusal("the rows are on GPU 0, so segments must be there too, not in host memory"));
  args.segments.device = gpu;
  EXPECT_THAT(forward, refusal("w1 must be on GPU 0, it is in host memory"));
  args.weights.w1.device = Device{.kind = DeviceKind::kCuda, .index = 1};
  EXPECT_THAT(forward, refusal("w1 must be on GPU 0, it is on GPU 1"));
}

TEST(Experts, OnAGpuDoNotSupportFp64AndFp8) {
  const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
  double somewhere = 0;
  for (const DType dtype : {DType::kF64, DType::kF8E4M3}) {
    const Experts experts({.num_local_experts = 1, .width = 4, .inner = 3, .dtype = DType::kF64});
    ExpertsForwardArgs args;
    args.rows = ConstTensorView(&somewhere, dtype, {2, 4}, gpu);
    try {
      experts.forward(args);
      ADD_FAILURE() << "no error came";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(name_of(dtype)), std::string::npos) << error.what();
    }
  }
}

// Rounded sums cannot be accumulated; a layer checks this before its ranks agree on a backward.
TEST(Experts, RefuseToAccumulateRoundedGradients) {
  const Experts experts({.num_local_experts = 1, .width = 4, .inner = 3, .dtype = DType::kBF16});
  const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
  float somewhere = 0;
  ExpertGradients grads;
  grads.w2 = TensorView(&somewhere, DType::kBF16, {1, 4, 3}, gpu);
  EXPECT_NO_THROW(experts.check(grads, gpu));
  EXPECT_THAT([&] { experts.check(grads, gpu, true); },
              refusal("accumulate needs gradients in fp32, got bf16"));
  grads.w2.dtype = DType::kF32;
  EXPECT_NO_THROW(experts.check(grads, gpu, true));
}

TEST(Experts, WithoutAGpuRefuseToPrepareForOne) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  const SmallExperts small;
  EXPECT_NO_THROW(small.experts.prepare(Device{}));
  try {
    small.experts.prepare({.kind = DeviceKind::kCuda, .index = 0});
    ADD_FAILURE() << "no error came";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
  }
}

TEST(Experts, WithoutAGpuRefuseItsTensors) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  SmallExperts small;
  const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
  ExpertsForwardArgs args = small.forward_args();
  args.rows.device = args.y.device = args.segments.device = gpu;
  args.weights.w1.device = args.weights.w2.device = gpu;
  try {
    small.experts.forward(args);
    ADD_FAILURE() << "no error came";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    EXPECT_NE(std::string(error.what()).find("CUDA"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace crossdock
