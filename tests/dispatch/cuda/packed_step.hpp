#pragma once

#include <functional>
#include <memory>
#include <string>

#include "dispatch/cuda/packed_path.hpp"
#include "dispatch/cuda/step.hpp"
#include "dispatch/strategies/allgather/allgather.hpp"
#include "dispatch/strategies/alltoall/alltoall.hpp"
#include "dispatch/strategies/direct/direct.hpp"

namespace crossdock {

inline cuda::Packing packing_of(const std::string& strategy) {
  if (strategy == "alltoall") return cuda::alltoall_packing();
  if (strategy == "allgather") return cuda::allgather_packing();
  return cuda::relay_packing();
}

/// Strategies that pack rows, over a transport that the test provides.
struct PackedSetting {
  DispatchCase the_case;
  ThreadOptions options{};
  std::string strategy;
  cuda::MakeTransport make_transport;
};

/// One rank's path with that transport.
inline std::unique_ptr<Path> make_packed_path(Group& group, const PackedSetting& setting) {
  return cuda::make_packed_path(
      PathContext{.group = group,
                  .config = std::make_shared<const DispatchConfig>(setting.the_case.config),
                  .strategy = make_strategy(setting.strategy),
                  .config_text = {}},
      cuda_device_of(group), packing_of(setting.strategy), setting.make_transport);
}

/// One rank: its tensors on the GPU and its path.
struct PackedRank {
  PackedRank(Group& group, const PackedSetting& setting)
      : stream(group),
        tensors(tensors_of(setting.the_case.config,
                           setting.the_case.ranks[static_cast<size_t>(group.rank())], DType::kF32),
                stream),
        path(make_packed_path(group, setting)) {
    stream.synchronize();
    path->set_options({.stream = stream.view()});
  }

  const RankStream stream;
  const DeviceTensors tensors;
  const std::unique_ptr<Path> path;
};

/// Expects that one step is bit-identical to the CPU.
inline void expect_bits_of_the_cpu(const PackedSetting& setting) {
  SCOPED_TRACE(setting.strategy);
  const DispatchCase& the_case = setting.the_case;
  run_ranks(
      static_cast<int>(the_case.ranks.size()),
      [&](Group& group) {
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        const PackedRank rank(group, setting);
        const Plan plan = rank.path->plan(rank.tensors.routing());
        const DispatchResult moved = rank.path->dispatch(
            plan, {.x = rank.tensors.x.view, .with_row_weights = true}, nullptr);
        const OwnedTensor out = rank.path->gather_sum(
            "combine", plan, {.rows = moved.rows.view, .weights = plan.weights(), .out = {}},
            nullptr);
        const CombineBackwardResult backward = rank.path->combine_backward(
            plan, {.grad_out = rank.tensors.grad_out.view, .y = moved.rows.view});
        EXPECT_EQ(to_host(moved.rows.view, rank.stream), wanted.rows);
        EXPECT_EQ(to_host(moved.row_weights.view, rank.stream), wanted.row_weights);
        EXPECT_EQ(to_host(out.view, rank.stream), wanted.out);
        EXPECT_EQ(to_host(backward.grad_rows.view, rank.stream), wanted.grad_rows);
        EXPECT_EQ(to_host(backward.grad_weights.view, rank.stream), wanted.grad_weights);
        rank.path->check();
      },
      setting.options);
}

}  // namespace crossdock
