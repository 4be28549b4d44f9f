// Waits for streams that finish, and for streams that do not.

#include "comm/cuda/stream_watch.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>

#include "core/cuda/stream.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/tensors.hpp"

namespace crossdock {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using CudaStreamWatch = CudaTest;

cuda::StreamWatch::Options options_of(std::chrono::nanoseconds arrival,
                                      std::chrono::nanoseconds progress) {
  return {.rank = 2, .size = 4, .arrival_deadline = arrival, .progress_deadline = progress};
}

TEST_F(CudaStreamWatch, ReturnsWhenTheStreamIsDone) {
  const RankStream stream;
  const Gate gate;
  cuda::StreamWatch watch(options_of(seconds(60), seconds(60)));
  watch.begin_exchange(stream.get(), "dispatch", 7);
  gate.hold(stream.get());
  watch.end_exchange(stream.get());
  EXPECT_FALSE(watch.fault().has_value());
  gate.open();
  EXPECT_FALSE(watch.try_await(stream.get()).has_value());
  EXPECT_FALSE(watch.fault().has_value());
}

TEST_F(CudaStreamWatch, NamesTheExchangeThatIsLate) {
  const RankStream stream;
  const Gate gate;
  cuda::StreamWatch watch(options_of(seconds(60), milliseconds(200)));
  watch.begin_exchange(stream.get(), "dispatch", 7);
  watch.end_exchange(stream.get());
  watch.begin_exchange(stream.get(), "combine", 8);
  gate.hold(stream.get());
  watch.end_exchange(stream.get());
  const std::optional<Error> error = watch.try_await(stream.get());
  ASSERT_TRUE(error.has_value());
  EXPECT_TRUE(gate.is_closed());
  EXPECT_EQ(error->code(), ErrorCode::kTimeout);
  EXPECT_THAT(error->what(), HasSubstr("rank 2 of 4: NCCL did not finish combine (call 8)"));
  EXPECT_EQ(error->context().sequence, 8U);
  gate.open();
  stream.synchronize();
  EXPECT_TRUE(watch.fault().has_value());  // the fault persists
}

// Time that the caller's own work takes before an exchange does not count.
TEST_F(CudaStreamWatch, CountsFromWhenTheStreamReachesTheExchange) {
  const RankStream stream;
  const Gate gate;
  cuda::StreamWatch watch(options_of(seconds(2), milliseconds(1)));
  gate.hold(stream.get());
  watch.begin_exchange(stream.get(), "dispatch", 7);
  watch.end_exchange(stream.get());
  const std::optional<Error> error = watch.try_await(stream.get());
  ASSERT_TRUE(error.has_value());
  EXPECT_TRUE(gate.is_closed());
  EXPECT_EQ(error->code(), ErrorCode::kTimeout);
  EXPECT_THAT(error->what(), HasSubstr("s for its GPU stream"));
  EXPECT_FALSE(watch.fault().has_value());
  gate.open();
  stream.synchronize();
}

TEST_F(CudaStreamWatch, ReportsWhatTheProbeFinds) {
  const RankStream stream;
  const Gate gate;
  cuda::StreamWatch watch(options_of(seconds(60), seconds(60)));
  watch.set_probe({.error = [] { return std::string("a peer is gone"); }});
  EXPECT_FALSE(watch.fault().has_value());  // nothing is pending
  watch.begin_exchange(stream.get(), "dispatch", 7);
  gate.hold(stream.get());
  watch.end_exchange(stream.get());
  const std::optional<Error> error = watch.try_await(stream.get());
  ASSERT_TRUE(error.has_value());
  EXPECT_TRUE(gate.is_closed());
  EXPECT_EQ(error->code(), ErrorCode::kCommunication);
  EXPECT_THAT(error->what(), HasSubstr("NCCL failed in dispatch (call 7): a peer is gone"));
  gate.open();
  stream.synchronize();
}

TEST_F(CudaStreamWatch, AbortsACommunicatorThatItMayAbort) {
  const RankStream stream;
  const Gate gate;
  cuda::StreamWatch watch(options_of(seconds(60), milliseconds(200)));
  int num_aborts = 0;
  watch.set_probe({.error = [] { return std::string(); }, .abort = [&] { ++num_aborts; }});
  watch.begin_exchange(stream.get(), "dispatch", 7);
  gate.hold(stream.get());
  watch.end_exchange(stream.get());
  const std::optional<Error> error = watch.try_await(stream.get());
  ASSERT_TRUE(error.has_value());
  EXPECT_TRUE(watch.fault().has_value());
  EXPECT_EQ(num_aborts, 1);
  EXPECT_THAT(error->what(), HasSubstr("NCCL did not finish dispatch"));
  EXPECT_THAT(error->what(), HasSubstr("The communicator has been aborted"));
  gate.open();
  stream.synchronize();
}

TEST_F(CudaStreamWatch, ABusyStreamIsNotLeasedAgain) {
  const Gate gate;
  std::shared_ptr<const cuda::OwnedStream> busy = cuda::lease_stream(0);
  const cudaStream_t handle = busy->get();
  gate.hold(handle);
  busy.reset();
  const auto other = cuda::lease_stream(0);
  EXPECT_NE(other->get(), handle);
  gate.open();
  cuda_ok(cudaStreamSynchronize(handle));
  EXPECT_EQ(cuda::lease_stream(0)->get(), handle);
}

}  // namespace
}  // namespace crossdock
