#pragma once

#include <functional>
#include <memory>
#include <string>

#include "dispatch/cuda/cuda_packed.hpp"
#include "dispatch/cuda/step.hpp"
#include "dispatch/strategies/packings.hpp"

namespace crossdock {

inline cuda::Packing packing_of(const std::string& strategy) {
  if (strategy == "alltoall") return cuda::alltoall_packing();
  if (strategy == "allgather") return cuda::allgather_packing();
  return cuda::relay_packing();
}

/// Strategies that pack rows, over a transport of the test.
struct PackedSetting {
  DispatchCase the_case;
  ThreadOptions options{};
  std::string strategy;
  cuda::CudaPacked::MakeTransport make_transport;
};

/// One rank's path with that transport.
inline std::unique_ptr<cuda::CudaPacked> make_packed_path(Group& group,
                                                          const PackedSetting& setting) {
  return std::make_unique<cuda::CudaPacked>(
      PathContext{.group = group,
                  .config = std::make_shared<const DispatchConfig>(setting.the_case.config),
                  .strategy = make_strategy(setting.strategy),
                  .config_text = {}},
      cuda_device_of(group), packing_of(setting.strategy), setting.make_transport);
}

/// One step has the bits of the CPU.
inline void expect_bits_of_the_cpu(const PackedSetting& setting) {
  SCOPED_TRACE(setting.strategy);
  const DispatchCase& the_case = setting.the_case;
  run_ranks(
      static_cast<int>(the_case.ranks.size()),
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        const RankTensors host = tensors_of(the_case.config, the_case.ranks[r], DType::kF32);
        const RankStream stream(group);
        const DeviceTensors tensors(host, stream);
        stream.synchronize();
        const std::unique_ptr<cuda::CudaPacked> path = make_packed_path(group, setting);
        path->set_options({.stream = stream.view()});
        const Plan plan = path->plan(tensors.routing());
        const DispatchResult moved =
            path->dispatch(plan, {.x = tensors.x.view, .with_row_weights = true});
        const OwnedTensor out = path->gather_sum(
            "combine", plan, {.rows = moved.rows.view, .weights = plan.weights(), .out = {}});
        const CombineBackwardResult backward =
            path->combine_backward(plan, {.grad_out = tensors.grad_out.view, .y = moved.rows.view});
        EXPECT_EQ(to_host(moved.rows.view, stream), wanted.rows);
        EXPECT_EQ(to_host(moved.row_weights.view, stream), wanted.row_weights);
        EXPECT_EQ(to_host(out.view, stream), wanted.out);
        EXPECT_EQ(to_host(backward.grad_rows.view, stream), wanted.grad_rows);
        EXPECT_EQ(to_host(backward.grad_weights.view, stream), wanted.grad_weights);
        path->check();
      },
      setting.options);
}

}  // namespace crossdock
