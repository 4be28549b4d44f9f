// GPUs whose blocks have less shared memory than this one's.

#include <gtest/gtest.h>

#include <optional>

#include "core/cuda/device.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using CudaSmallGpu = CudaTest;

// A plan made on the device has max_rows rows; a plan made on the host has as many as it needs.
void expect_plan(int64_t num_experts, bool is_made_on_host,
                 std::optional<int64_t> shared_memory = {}) {
  constexpr int64_t kMaxRows = 4000;
  const DispatchConfig config{
      .num_experts = num_experts, .top_k = 4, .width = 24, .max_rows = kMaxRows};
  run_on_gpu(random_case(config, {300, 0, 40}, 6),
             {.dtype = DType::kBF16, .pretences = {.shared_memory_per_block = shared_memory}},
             [&](GpuRank& rank, const StepBytes& wanted) {
               for (int step = 0; step < 2; ++step) {
                 const QueuedStep queued(rank.dispatcher, rank.tensors);
                 expect_same(queued.wait(rank.stream), wanted);
                 EXPECT_EQ(queued.plan.capacity_rows(),
                           is_made_on_host ? queued.plan.num_rows() : kMaxRows);
               }
               rank.dispatcher.check();
             });
}

TEST_F(CudaSmallGpu, PlansOnTheHostWhereTheCountsDoNotFit) {
  const int64_t of_sm_89 = int64_t{99} << 10;
  expect_plan(4000, /*is_made_on_host=*/false, of_sm_89);
  expect_plan(8192, /*is_made_on_host=*/true, of_sm_89);
  const int64_t of_sm_80 = int64_t{163} << 10;
  expect_plan(6700, /*is_made_on_host=*/false, of_sm_80);
  expect_plan(8192, /*is_made_on_host=*/true, of_sm_80);
  if (cuda::shared_memory_per_block(0) < int64_t{227} << 10) return;
  expect_plan(8192, /*is_made_on_host=*/false);
}

}  // namespace
}  // namespace crossdock
