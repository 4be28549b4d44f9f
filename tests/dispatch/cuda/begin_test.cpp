// Calls that run concurrently with the stream, and streams that change.

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <set>
#include <utility>

#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using CudaBegin = CudaTest;

DispatchConfig small_config() {
  return {.num_experts = 11, .top_k = 3, .width = 40};
}

// Steps of two plans, the second begun before the first ends.
TEST_F(CudaBegin, GivesTheBitsOfTheCpuWhereCallsBeginBeforeOthersEnd) {
  const DispatchCase first = random_case(small_config(), {50, 0, 30}, 11);
  const DispatchCase second = random_case(small_config(), {20, 40, 9}, 12);
  // All SMs; few enough that kernels of both streams can wait for their peers themselves; so many
  // that only those of one stream can.
  for (const int max_sms : {0, 16, 40}) {
    const GpuSetting setting{.dtype = DType::kBF16, .options = {.max_sms = max_sms}};
    run_on_gpu(first, setting, [&](GpuRank& rank, const StepBytes& wanted_first) {
      const auto r = static_cast<size_t>(rank.group.rank());
      const StepBytes wanted_second = cpu_step(rank.group, second, DType::kBF16);
      const RankStream& stream = rank.stream;
      const DeviceTensors& a = rank.tensors;
      const DeviceTensors b(tensors_of(second.config, second.ranks[r], DType::kBF16), stream);
      Dispatcher& dispatcher = rank.dispatcher;
      for (int step = 0; step < 3; ++step) {
        const Plan plan_a = dispatcher.plan(a.routing());
        const Plan plan_b = dispatcher.plan(b.routing());
        const DispatchResult moved_a = dispatcher.dispatch(plan_a, {.x = a.x.view});
        Pending<DispatchResult> pending_b = dispatcher.begin_dispatch(plan_b, {.x = b.x.view});
        Pending<OwnedTensor> pending_a = dispatcher.begin_combine(plan_a, moved_a.rows.view);
        const OwnedTensor grad_x = dispatcher.dispatch_backward(plan_a, moved_a.rows.view);
        const DispatchResult moved_b = dispatcher.finish(std::move(pending_b));
        const OwnedTensor out_b = dispatcher.combine(plan_b, moved_b.rows.view);
        const OwnedTensor out_a = dispatcher.finish(std::move(pending_a));
        EXPECT_EQ(to_host(moved_a.rows.view, stream), wanted_first.rows);
        EXPECT_EQ(to_host(out_a.view, stream), wanted_first.out);
        EXPECT_EQ(to_host(grad_x.view, stream), wanted_first.grad_x);
        EXPECT_EQ(to_host(moved_b.rows.view, stream), wanted_second.rows);
        EXPECT_EQ(to_host(out_b.view, stream), wanted_second.out);
      }
      dispatcher.check();
    });
  }
}

// The next plan must not get the memory of a plan that a begun call still reads.
TEST_F(CudaBegin, KeepsAPlanThatItsCallerHasLetGo) {
  DispatchConfig config = small_config();
  config.max_rows = 400;
  const DispatchCase the_case = random_case(config, {50, 30}, 17);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    for (int step = 0; step < 4; ++step) {
      std::optional<Plan> plan = rank.plan();
      Pending<DispatchResult> pending =
          rank.dispatcher.begin_dispatch(*plan, {.x = rank.tensors.x.view});
      plan.reset();
      const Plan other = rank.plan();
      const DispatchResult moved = rank.dispatcher.finish(std::move(pending));
      EXPECT_EQ(to_host(moved.rows.view, other.num_rows(), rank.stream), wanted.rows);
    }
    rank.dispatcher.check();
  });
}

// Rank 1 is late for a dispatch: its stream is blocked until rank 0's has finished, so rank 0's
// stream must not wait for the call that rank 0 has begun.
TEST_F(CudaBegin, RunsBegunCallsBesideTheStream) {
  const DispatchCase the_case = random_case(small_config(), {20, 30}, 13);
  std::array<Gate, 3> gates;  // the driver may delay a stream by itself: try again
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const RankStream& stream = rank.stream;
    Dispatcher& dispatcher = rank.dispatcher;
    const Plan plan = rank.plan();
    const OwnedTensor rows =
        device_tensor(DType::kF32, {plan.num_rows(), the_case.config.width}, stream);
    const DispatchArgs args{.x = rank.tensors.x.view, .rows = rows.view};
    dispatcher.finish(dispatcher.begin_dispatch(plan, args));  // sets up
    stream.synchronize();
    bool has_overlapped = false;
    for (const Gate& gate : gates) {
      if (rank.group.rank() == 1) gate.hold(stream.get());
      rank.group.agree({.operation = "held"});
      Pending<DispatchResult> pending = dispatcher.begin_dispatch(plan, args);
      if (rank.group.rank() == 0) {
        const GateOpener opener(gate);
        stream.synchronize();
        has_overlapped = has_overlapped || gate.is_closed();
      }
      const DispatchResult moved = dispatcher.finish(std::move(pending));
      EXPECT_EQ(to_host(moved.rows.view, stream), wanted.rows);
    }
    EXPECT_TRUE(has_overlapped || rank.group.rank() != 0);
  });
}

// Rank 1 is late, so the combine that rank 0 has begun still reads y, whose memory must not be
// handed out again.
TEST_F(CudaBegin, KeepsTheRowsThatItsCallerHasReleased) {
  const DispatchCase the_case = random_case(small_config(), {20, 30}, 18);
  const Gate gate;
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const RankStream& stream = rank.stream;
    Dispatcher& dispatcher = rank.dispatcher;
    const Plan plan = rank.plan();
    const DispatchResult moved = dispatcher.dispatch(plan, {.x = rank.tensors.x.view});
    static_cast<void>(dispatcher.finish(dispatcher.begin_combine(plan, moved.rows.view)));
    OwnedTensor y = dispatcher.allocate_rows(plan, moved.rows.view.dtype);
    cuda_ok(cudaMemcpyAsync(y.view.data, moved.rows.view.data,
                            static_cast<size_t>(y.view.num_bytes()), cudaMemcpyDeviceToDevice,
                            stream.get()));
    stream.synchronize();
    if (rank.group.rank() == 1) gate.hold(stream.get());
    rank.group.agree({.operation = "held"});
    Pending<OwnedTensor> pending = dispatcher.begin_combine(plan, y.view);
    if (rank.group.rank() == 0) {
      const GateOpener opener(gate);
      const void* const place = y.view.data;
      y = {};
      const OwnedTensor other = dispatcher.allocate_rows(plan, moved.rows.view.dtype);
      EXPECT_NE(other.view.data, place);
      cuda_ok(cudaMemsetAsync(other.view.data, 0xff, static_cast<size_t>(other.view.num_bytes()),
                              stream.get()));
      stream.synchronize();
    }
    const OwnedTensor out = dispatcher.finish(std::move(pending));
    EXPECT_EQ(to_host(out.view, stream), wanted.out);
    dispatcher.check();
  });
}

// Rank 1 is late: once rank 0 has dropped its call, rank 0's stream waits for it.
TEST_F(CudaBegin, EndsACallThatIsDropped) {
  const DispatchCase the_case = random_case(small_config(), {20, 30}, 19);
  const Gate gate;
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const RankStream& stream = rank.stream;
    Dispatcher& dispatcher = rank.dispatcher;
    const Plan plan = rank.plan();
    const DispatchArgs args{.x = rank.tensors.x.view};
    static_cast<void>(dispatcher.finish(dispatcher.begin_dispatch(plan, args)));
    stream.synchronize();
    if (rank.group.rank() == 1) gate.hold(stream.get());
    rank.group.agree({.operation = "held"});
    { const Pending<DispatchResult> dropped = dispatcher.begin_dispatch(plan, args); }
    if (rank.group.rank() == 0) {
      const GateOpener opener(gate);
      EXPECT_EQ(cudaStreamQuery(stream.get()), cudaErrorNotReady);
      static_cast<void>(cudaGetLastError());  // if it is kept, launches would report it
      EXPECT_TRUE(gate.is_closed());
    }
    std::set<const void*> places;
    for (int step = 0; step < 50; ++step) {
      const Pending<DispatchResult> dropped = dispatcher.begin_dispatch(plan, args);
      places.insert(dropped.result().rows.view.data);
    }
    EXPECT_LE(places.size(), 5u);
    const DispatchResult moved = dispatcher.dispatch(plan, args);
    EXPECT_EQ(to_host(moved.rows.view, stream), wanted.rows);
    dispatcher.check();
  });
}

// Every call goes into another stream than the previous one; one of the two is busy for a while.
TEST_F(CudaBegin, KeepsTheOrderOfCallsWhereTheStreamChanges) {
  constexpr size_t kFilledBytes = size_t{256} << 20;
  const DispatchCase the_case = random_case(small_config(), {20, 30, 0}, 16);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const RankStream other;
    const OwnedTensor filled =
        device_tensor(DType::kU8, {static_cast<int64_t>(kFilledBytes)}, rank.stream);
    rank.stream.synchronize();
    const auto go_on_in = [&](const RankStream& stream) {
      for (int i = 0; &stream == &rank.stream && i < 8; ++i) {
        cuda_ok(cudaMemsetAsync(filled.view.data, i, kFilledBytes, stream.get()));
      }
      rank.dispatcher.set_device_options({.stream = stream.view()});
    };
    const DispatchArgs args{.x = rank.tensors.x.view, .with_row_weights = true};
    for (int step = 0; step < 3; ++step) {
      go_on_in(rank.stream);
      const Plan plan = rank.plan();
      go_on_in(other);
      const DispatchResult moved = rank.dispatcher.dispatch(plan, args);
      go_on_in(rank.stream);
      const OwnedTensor out = rank.dispatcher.combine(plan, moved.rows.view);
      go_on_in(other);
      const OwnedTensor grad_x = rank.dispatcher.dispatch_backward(plan, moved.rows.view);
      EXPECT_EQ(to_host(moved.rows.view, other), wanted.rows);
      EXPECT_EQ(to_host(out.view, other), wanted.out);
      EXPECT_EQ(to_host(grad_x.view, other), wanted.grad_x);
    }
    rank.dispatcher.set_device_options({.stream = rank.stream.view()});
    rank.dispatcher.check();
    rank.stream.synchronize();
  });
}

}  // namespace
}  // namespace crossdock
