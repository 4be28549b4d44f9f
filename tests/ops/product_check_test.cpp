// Arguments that grouped products refuse. Checks only look at descriptions, so no GPU is needed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/cuda/grouped_product.hpp"
#include "support/message_of.hpp"

namespace crossdock::ops {
namespace {

using ::testing::HasSubstr;

constexpr Device kGpu{.kind = DeviceKind::kCuda, .index = 0};

// Descriptions of tensors that are never read.
struct ForwardCase {
  alignas(16) std::byte x_memory[1 << 10];
  alignas(16) std::byte w_memory[1 << 10];
  alignas(16) std::byte out_memory[1 << 10];
  int64_t segment_memory[8];

  ProductForwardArgs args() {
    return {.x = {x_memory, DType::kBF16, {5, 8}, kGpu},
            .w = {w_memory, DType::kBF16, {2, 16, 8}, kGpu},
            .segments = {segment_memory, segment_memory + 3, 2, kGpu},
            .out = {out_memory, DType::kBF16, {5, 16}, kGpu}};
  }
};

template <typename Change>
std::string refusal(const Change& change) {
  ForwardCase test;
  ProductForwardArgs args = test.args();
  change(args);
  return message_of([&] { check_product(args, kGpu); });
}

TEST(ProductCheck, ReadsTheSizesOfItsTensors) {
  ForwardCase test;
  const ProductSizes sizes = check_product(test.args(), kGpu);
  EXPECT_EQ(sizes.R, 5);
  EXPECT_EQ(sizes.E_local, 2);
  EXPECT_EQ(sizes.N, 16);
  EXPECT_EQ(sizes.K, 8);
}

TEST(ProductCheck, SaysWhatIsWrongWithATensor) {
  using Args = ProductForwardArgs;
  EXPECT_THAT(refusal([](Args& args) { args.x.shape = {5, 9}; }), HasSubstr("x must be [5, 8]"));
  EXPECT_THAT(refusal([](Args& args) { args.x.dtype = DType::kF16; }), HasSubstr("bf16"));
  EXPECT_THAT(refusal([](Args& args) { args.x.device = {}; }), HasSubstr("x must be on GPU 0"));
  EXPECT_THAT(refusal([](Args& args) {
                args.w.shape = {2, 128};
              }),
              HasSubstr("w must have 3 dimensions"));
  EXPECT_THAT(refusal([](Args& args) { args.out.data = nullptr; }), HasSubstr("null"));
  EXPECT_THAT(refusal([](Args& args) { args.out.data = const_cast<void*>(args.x.data); }),
              HasSubstr("overlaps"));
  EXPECT_THAT(refusal([](Args& args) { args.segments.num_segments = 3; }),
              HasSubstr("there must be 2 segments"));
  EXPECT_THAT(refusal([](Args& args) { args.segments.device = {}; }),
              HasSubstr("segments must be on GPU 0"));
}

TEST(ProductCheck, SaysWhatSwigluNeeds) {
  using Args = ProductForwardArgs;
  EXPECT_THAT(refusal([](Args& args) { args.epilogue = ProductEpilogue::kSwiglu; }),
              HasSubstr("out must be [5, 8]"));
  EXPECT_THAT(refusal([](Args& args) {
                args.epilogue = ProductEpilogue::kSwigluKeepHidden;
                args.out.shape = {5, 8};
              }),
              HasSubstr("hidden must be given"));
  EXPECT_THAT(refusal([](Args& args) { args.interleaved = true; }), HasSubstr("SwiGLU"));
}

TEST(ProductCheck, RefusesFp8AndNamesTheWayOut) {
  ForwardCase test;
  ProductForwardArgs args = test.args();
  args.w.dtype = DType::kF8E4M3;
  try {
    check_product(args, kGpu);
    ADD_FAILURE() << "no error came";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("dequantise_rows"));
  }
}

TEST(ProductCheck, AccumulatesInFp32Only) {
  ForwardCase test;
  ProductDwArgs args{.grad = {test.x_memory, DType::kBF16, {5, 4}, kGpu},
                     .x = {test.w_memory, DType::kBF16, {5, 8}, kGpu},
                     .segments = {test.segment_memory, test.segment_memory + 3, 2, kGpu},
                     .out = {test.out_memory, DType::kBF16, {2, 4, 8}, kGpu},
                     .accumulate = true};
  EXPECT_THAT(message_of([&] { check_product(args, kGpu); }), HasSubstr("fp32"));
  args.out.dtype = DType::kF32;
  EXPECT_EQ(check_product(args, kGpu).N, 4);
}

}  // namespace
}  // namespace crossdock::ops
