// Without a GPU, or without CUDA in the build, tensors on a GPU are refused by all ranks.

#include <gtest/gtest.h>

#include "crossdock/cuda.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/threads.hpp"

namespace crossdock {
namespace {

TEST(WithoutAGpu, TensorsOfOneAreRefused) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_FALSE(cuda_missing_reason().empty());
  run_ranks(2, [](Group& group) {
    Dispatcher dispatcher(group, {.num_experts = 4, .top_k = 2, .width = 8}, "direct");
    const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
    int32_t somewhere = 0;
    const Routing routing{.expert_ids = ConstTensorView(&somewhere, DType::kI32, {1, 2}, gpu),
                          .weights = ConstTensorView(&somewhere, DType::kF32, {1, 2}, gpu)};
    for (int again = 0; again < 2; ++again) {
      try {
        static_cast<void>(dispatcher.plan(routing));
        ADD_FAILURE() << "no error came";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
        EXPECT_NE(std::string(error.what()).find("CUDA"), std::string::npos) << error.what();
      }
    }
    group.check();
  });
}

}  // namespace
}  // namespace crossdock
