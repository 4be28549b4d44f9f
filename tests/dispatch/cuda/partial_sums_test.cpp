// Partial sums on a GPU are bit-identical to those on the CPU.

#include <gtest/gtest.h>

#include <vector>

#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using CudaPartialSums = CudaTest;

// Values whose sums are rounded, so another order or rounding gives other bits.
DispatchCase rounding_case(const DispatchConfig& config, const std::vector<int64_t>& tokens,
                           unsigned seed) {
  DispatchCase result = random_case(config, tokens, seed);
  for (reference::RankInput& rank : result.ranks) {
    for (double& value : rank.x) value = value * 1.37 + 0.013;
    for (double& weight : rank.weights) weight = weight * 0.71 + 0.003;
  }
  return result;
}

void expect_cpu_bits(const DispatchCase& the_case, const GpuSetting& setting) {
  run_on_gpu(the_case, setting, [&](GpuRank& rank, const StepBytes& /*of direct*/) {
    const auto r = static_cast<size_t>(rank.group.rank());
    const RankTensors tensors = tensors_of(the_case.config, the_case.ranks[r], setting.dtype);
    Dispatcher host(rank.group, the_case.config, setting.strategy);
    const StepBytes wanted = cpu_step(host, host.plan(tensors.routing()), tensors);
    const QueuedStep step(rank.dispatcher, rank.tensors);
    const StepBytes got = step.wait(rank.stream);
    EXPECT_EQ(got.rows, wanted.rows);
    EXPECT_EQ(got.out, wanted.out);
    EXPECT_EQ(got.grad_x, wanted.grad_x);
    EXPECT_EQ(got.grad_rows, wanted.grad_rows);
    rank.dispatcher.check();
  });
}

TEST_F(CudaPartialSums, HaveTheBitsOfTheCpu) {
  unsigned seed = 300;
  for (const PartialSums sums : {PartialSums::kF32, PartialSums::kRowType}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(seed);
      const DispatchConfig exact{.num_experts = 13, .top_k = 9, .width = 520, .partial_sums = sums};
      DispatchConfig bounded = exact;
      bounded.max_rows = 900;
      bounded.alignment = 8;
      bounded.width = 37;
      expect_cpu_bits(rounding_case(exact, {20, 0, 31}, seed++), {.dtype = dtype});
      expect_cpu_bits(rounding_case(bounded, {40, 20}, seed++), {.dtype = dtype});
      expect_cpu_bits(rounding_case(bounded, {40, 20}, seed++),
                      {.dtype = dtype, .options = {.max_sms = 20}});
      expect_cpu_bits(rounding_case(exact, {40}, seed++), {.dtype = dtype});
      expect_cpu_bits(rounding_case(exact, {21, 20}, seed++),
                      {.dtype = dtype, .strategy = "hierarchical"});
    }
  }
}

TEST_F(CudaPartialSums, WorkWithOneCopyPerRankAndWithPlansMadeOnTheHost) {
  const DispatchConfig config{.num_experts = 8,
                              .top_k = 5,
                              .width = 64,
                              .capacity = Capacity{.factor = 0.7, .policy = DropPolicy::kWeight},
                              .partial_sums = PartialSums::kRowType,
                              .copies = Copies::kPerRank};
  expect_cpu_bits(rounding_case(config, {33, 20, 1}, 350), {.dtype = DType::kBF16});
}

// Rows need not be in the library's memory: peers read only the sums, which are.
TEST_F(CudaPartialSums, AreMadeFromForeignRowsWithoutACopy) {
  const DispatchConfig config{
      .num_experts = 8, .top_k = 5, .width = 64, .partial_sums = PartialSums::kF32};
  run_on_gpu(rounding_case(config, {33, 20}, 360), {}, [](GpuRank& rank, const StepBytes& wanted) {
    const Plan plan = rank.plan();
    const DispatchResult moved = rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view});
    const OwnedTensor rows = device_tensor(DType::kF32, moved.rows.view.shape, rank.stream);
    cuda_ok(cudaMemcpyAsync(rows.view.data, moved.rows.view.data,
                            static_cast<size_t>(rows.view.num_bytes()), cudaMemcpyDeviceToDevice,
                            rank.stream.get()));
    const OwnedTensor out = rank.dispatcher.combine(plan, rows.view);
    EXPECT_EQ(to_host(out.view, rank.stream), wanted.out);
    for (const Event& event : rank.group.recorder().events()) {
      EXPECT_STRNE(event.phase, "copy of foreign rows");
    }
    rank.group.agree({.operation = "done"});
  });
}

}  // namespace
}  // namespace crossdock
