// Kernels that wait with all their blocks, in more streams than fit on the GPU.

#include <gtest/gtest.h>

#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "crossdock/cuda.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

TEST(CudaWaitingRoom, IsSharedByTheTakersOfAStreamAndDividedAmongStreams) {
  cuda::WaitingRoom room(10);
  const auto first = room.take({.stream_id = 1, .sms = 6, .num_streams = 2});
  const auto of_same_stream = room.take({.stream_id = 1, .sms = 4, .num_streams = 2});
  EXPECT_NE(first, nullptr);
  EXPECT_NE(of_same_stream, nullptr);
  EXPECT_EQ(room.take({.stream_id = 2, .sms = 5, .num_streams = 2}), nullptr);
  EXPECT_NE(room.take({.stream_id = 2, .sms = 4, .num_streams = 2}), nullptr);
}

TEST(CudaWaitingRoom, IsFreeAgainWhenGivenBack) {
  cuda::WaitingRoom room(10);
  auto large = room.take({.stream_id = 1, .sms = 10, .num_streams = 2});
  const auto small = room.take({.stream_id = 1, .sms = 3, .num_streams = 2});
  EXPECT_EQ(room.take({.stream_id = 2, .sms = 7, .num_streams = 2}), nullptr);
  large.reset();
  EXPECT_NE(room.take({.stream_id = 2, .sms = 7, .num_streams = 2}), nullptr);
  EXPECT_EQ(room.take({.stream_id = 2, .sms = 8, .num_streams = 2}), nullptr);
}

TEST(CudaWaitingRoom, HasThreeQuartersForKernelsOfDifferentCalls) {
  cuda::WaitingRoom room(100);
  const auto first = room.take({.stream_id = 1, .sms = 25, .num_streams = 2});
  const auto second = room.take({.stream_id = 2, .sms = 25, .num_streams = 2});
  EXPECT_EQ(room.take({.stream_id = 3, .sms = 26, .num_streams = 2}), nullptr);
  auto of_another_call = room.take({.stream_id = 3, .sms = 25, .num_streams = 2});
  EXPECT_NE(of_another_call, nullptr);
  EXPECT_EQ(room.take({.stream_id = 2, .sms = 75, .num_streams = 2}), nullptr);
  of_another_call.reset();  // its stream no longer counts
  EXPECT_NE(room.take({.stream_id = 2, .sms = 75, .num_streams = 2}), nullptr);
}

// Each rank has two dispatchers in two streams; the waiting rooms of one of them fill the GPU.
TEST(CudaWaitingRoom, KernelsOfTwoDispatchersDoNotKeepEachOtherOut) {
  if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  const DispatchConfig config{.num_experts = 11, .top_k = 3, .width = 40, .max_rows = 3600};
  const DispatchCase the_case = random_case(config, {700, 500}, 17);
  const int num_sms = cuda::num_sms(0);
  run_ranks(
      2,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, the_case, DType::kBF16);
        const RankStream streams[2] = {RankStream(group), RankStream(group)};
        const RankTensors host = tensors_of(config, the_case.ranks[r], DType::kBF16);
        const DeviceTensors tensors[2] = {{host, streams[0]}, {host, streams[1]}};
        Dispatcher dispatchers[2] = {{group, config, "direct"}, {group, config, "direct"}};
        for (int i = 0; i < 2; ++i) {
          dispatchers[i].set_device_options({.stream = streams[i].view(), .max_sms = num_sms / 2});
        }
        for (int step = 0; step < 10; ++step) {
          const QueuedStep first(dispatchers[0], tensors[0]);
          const QueuedStep second(dispatchers[1], tensors[1]);
          EXPECT_EQ(first.wait(streams[0]).out, wanted.out);
          EXPECT_EQ(second.wait(streams[1]).out, wanted.out);
        }
      },
      short_deadlines());
}

}  // namespace
}  // namespace crossdock
