#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/attachment.hpp"
#include "crossdock/dispatcher.hpp"
#include "dispatch/cuda/tensors.hpp"
#include "dispatch/random_case.hpp"
#include "support/message_of.hpp"

namespace crossdock {

/// The results of one step of one rank, as bytes.
struct StepBytes {
  std::vector<std::byte> rows;
  std::vector<std::byte> row_weights;
  std::vector<std::byte> out;
  std::vector<std::byte> grad_x;
  std::vector<std::byte> grad_rows;
  std::vector<std::byte> grad_weights;
};

inline void expect_same(const StepBytes& got, const StepBytes& wanted) {
  EXPECT_EQ(got.rows, wanted.rows);
  EXPECT_EQ(got.row_weights, wanted.row_weights);
  EXPECT_EQ(got.out, wanted.out);
  EXPECT_EQ(got.grad_x, wanted.grad_x);
  EXPECT_EQ(got.grad_rows, wanted.grad_rows);
  EXPECT_EQ(got.grad_weights, wanted.grad_weights);  // sums of small integers: exact
}

/// The error that a call throws, if it throws one.
inline std::optional<Error> error_of(const std::function<void()>& call) {
  try {
    call();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

/// One step on the CPU: dispatch, combine of the rows, and both backwards.
inline StepBytes cpu_step(Dispatcher& dispatcher, const Plan& plan, const RankTensors& tensors) {
  const DispatchResult moved =
      dispatcher.dispatch(plan, {.x = tensors.x.view, .with_row_weights = true});
  const OwnedTensor out = dispatcher.combine(plan, moved.rows.view);
  const OwnedTensor grad_x = dispatcher.dispatch_backward(plan, moved.rows.view);
  const CombineBackwardResult backward =
      dispatcher.combine_backward(plan, tensors.grad_out.view, moved.rows.view);
  return {.rows = bytes_of(moved.rows.view),
          .row_weights = bytes_of(moved.row_weights.view),
          .out = bytes_of(out.view),
          .grad_x = bytes_of(grad_x.view),
          .grad_rows = bytes_of(backward.grad_rows.view),
          .grad_weights = bytes_of(backward.grad_weights.view)};
}

inline StepBytes cpu_step(Group& group, const DispatchCase& the_case, DType dtype) {
  const auto r = static_cast<size_t>(group.rank());
  const RankTensors tensors = tensors_of(the_case.config, the_case.ranks[r], dtype);
  Dispatcher dispatcher(group, the_case.config, "direct");
  return cpu_step(dispatcher, dispatcher.plan(tensors.routing()), tensors);
}

/// A rank's tensors on the GPU.
struct DeviceTensors {
  OwnedTensor x;
  OwnedTensor grad_out;
  OwnedTensor expert_ids;
  OwnedTensor weights;
  OwnedTensor mask;

  DeviceTensors(const RankTensors& host, const RankStream& stream)
      : x(to_device(host.x.view, stream)),
        grad_out(to_device(host.grad_out.view, stream)),
        expert_ids(to_device(host.expert_ids.view, stream)),
        weights(to_device(host.weights.view, stream)),
        mask(to_device(host.mask.view, stream)) {}

  Routing routing() const {
    return {.expert_ids = expert_ids.view, .weights = weights.view, .mask = mask.view};
  }
};

/// The same step queued on the GPU; results are valid once the stream has reached them.
struct QueuedStep {
  Plan plan;
  DispatchResult moved;
  OwnedTensor out;
  OwnedTensor grad_x;
  CombineBackwardResult backward;

  QueuedStep(Dispatcher& dispatcher, const DeviceTensors& tensors)
      : QueuedStep(dispatcher, dispatcher.plan(tensors.routing()), tensors) {}

  QueuedStep(Dispatcher& dispatcher, Plan made, const DeviceTensors& tensors)
      : plan(std::move(made)),
        moved(dispatcher.dispatch(plan, {.x = tensors.x.view, .with_row_weights = true})),
        out(dispatcher.combine(plan, moved.rows.view)),
        grad_x(dispatcher.dispatch_backward(plan, moved.rows.view)),
        backward(dispatcher.combine_backward(plan, tensors.grad_out.view, moved.rows.view)) {}

  StepBytes wait(const RankStream& stream) const {
    stream.synchronize();
    const int64_t R = plan.num_rows();
    return {.rows = to_host(moved.rows.view, R, stream),
            .row_weights = to_host(moved.row_weights.view, R, stream),
            .out = to_host(out.view, stream),
            .grad_x = to_host(grad_x.view, stream),
            .grad_rows = to_host(backward.grad_rows.view, R, stream),
            .grad_weights = to_host(backward.grad_weights.view, stream)};
  }
};

/// How ranks work on the GPU.
struct GpuSetting {
  DType dtype = DType::kF32;
  DeviceOptions options{};  // stream: set to each rank's own
  std::string strategy = "direct";
  bool is_on_one_gpu = false;  // all ranks on GPU 0
  comm::GpuPretences pretences{};
};

/// One rank on its GPU: its stream, its tensors and a dispatcher that works in the stream.
struct GpuRank {
  Group& group;
  RankStream stream;
  DeviceTensors tensors;
  Dispatcher dispatcher;

  GpuRank(Group& group_in, const DispatchCase& the_case, const GpuSetting& setting)
      : group(group_in),
        stream(setting.is_on_one_gpu ? RankStream() : RankStream(group)),
        tensors(tensors_of(the_case.config, the_case.ranks[static_cast<size_t>(group.rank())],
                           setting.dtype),
                stream),
        dispatcher(group, the_case.config, setting.strategy) {
    DeviceOptions options = setting.options;
    options.stream = stream.view();
    dispatcher.set_device_options(options);
  }

  Plan plan() { return dispatcher.plan(tensors.routing()); }
};

/// Runs body(rank, wanted) for every rank of a case, on all available GPUs; `wanted` is the CPU's
/// step.
inline void run_on_gpu(const DispatchCase& the_case, const GpuSetting& setting,
                       const std::function<void(GpuRank&, const StepBytes& wanted)>& body) {
  run_ranks(
      static_cast<int>(the_case.ranks.size()),
      [&](Group& group) {
        comm::gpu_pretences_of(group) = setting.pretences;
        const StepBytes wanted = cpu_step(group, the_case, setting.dtype);
        GpuRank rank(group, the_case, setting);
        body(rank, wanted);
      },
      short_deadlines());
}

}  // namespace crossdock
