// cudaStreamPerThread is a different stream on every thread: if a group's calls come from several
// threads, they keep their order, and memory is not reused too early.

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <optional>
#include <thread>

#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using CudaPerThread = CudaTest;

Stream per_thread() {
  return {cudaStreamPerThread};
}

/// Runs body on another thread, with the same GPU; rethrows its exception.
template <typename Body>
void on_other_thread(const Body& body) {
  std::async(std::launch::async, [&body, device = current_gpu()] {
    cuda_ok(cudaSetDevice(device));
    body();
  }).get();
}

/// Long enough for work that does not wait to finish.
void wait_a_little() {
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

void wait_for_thread_stream() {
  cuda_ok(cudaStreamSynchronize(cudaStreamPerThread));
}

DispatchConfig config_with_room() {
  return {.num_experts = 9, .top_k = 2, .width = 72, .max_rows = 400};
}

// The plan waits behind a gate in this thread's stream; the calls that use it are made by another
// thread, whose stream is free.
void expect_order_across_threads(const std::vector<int64_t>& tokens_per_rank,
                                 const DeviceOptions& options) {
  const DispatchCase cases[] = {random_case(config_with_room(), tokens_per_rank, 90),
                                random_case(config_with_room(), tokens_per_rank, 91)};
  run_ranks(
      static_cast<int>(tokens_per_rank.size()),
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const RankStream setup(group);
        Dispatcher dispatcher(group, cases[0].config, "direct");
        dispatcher.set_device_options(options);
        for (int step = 0; step < 4; ++step) {  // plans differ, so an old one cannot pass
          const DispatchCase& the_case = cases[step % 2];
          const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
          const DeviceTensors tensors(tensors_of(the_case.config, the_case.ranks[r], DType::kF32),
                                      setup);
          setup.synchronize();
          std::optional<StreamGate> gate;
          if (step > 0) gate.emplace(cudaStreamPerThread);  // after one-time set-up
          const Plan plan = dispatcher.plan(tensors.routing());
          on_other_thread([&] {
            const DispatchResult moved = dispatcher.dispatch(plan, {.x = tensors.x.view});
            const OwnedTensor out = dispatcher.combine(plan, moved.rows.view);
            wait_a_little();
            if (gate) gate->open();
            wait_for_thread_stream();
            const int64_t R = plan.num_rows();
            EXPECT_EQ(to_host(moved.rows.view, R, setup), wanted.rows);
            EXPECT_EQ(to_host(out.view, setup), wanted.out);
          });
          wait_for_thread_stream();
          dispatcher.check();
        }
      },
      short_deadlines());
}

TEST_F(CudaPerThread, CallsFromTwoThreadsKeepTheirOrder) {
  expect_order_across_threads({30}, {.stream = per_thread()});
}

TEST_F(CudaPerThread, CallsFromTwoThreadsKeepTheirOrderInTheDefaultStreamOfThreadRanks) {
  expect_order_across_threads({30, 50}, {});
}

TEST_F(CudaPerThread, TheNumberOfRowsIsThatOfThePlanOnAnyThread) {
  const DispatchCase the_case = random_case(config_with_room(), {30}, 92);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    rank.dispatcher.set_device_options({.stream = per_thread()});
    rank.stream.synchronize();
    const DispatchCase smaller = random_case(the_case.config, {10}, 92);
    const DeviceTensors others(tensors_of(smaller.config, smaller.ranks[0], DType::kF32),
                               rank.stream);
    rank.stream.synchronize();
    { const Plan in_the_same_memory = rank.dispatcher.plan(others.routing()); }
    StreamGate gate(cudaStreamPerThread);
    const Plan plan = rank.plan();
    on_other_thread([&] {
      std::future<void> opened = std::async(std::launch::async, [&] {
        wait_a_little();
        gate.open();
      });
      const int64_t row_bytes = the_case.config.width * size_of(DType::kF32);
      EXPECT_EQ(plan.num_rows() * row_bytes, std::ssize(wanted.rows));
    });
    wait_for_thread_stream();
  });
}

// This thread's stream still has to write rows when it releases them; another thread then gets the
// same memory and writes there. The other thread's bytes must stay.
TEST_F(CudaPerThread, MemoryThatOneThreadReleasesIsUsedByAnotherAfterItsWork) {
  const DispatchCase the_case = random_case(config_with_room(), {30}, 93);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& /*wanted*/) {
    rank.dispatcher.set_device_options({.stream = per_thread()});
    rank.stream.synchronize();
    const Plan plan = rank.plan();
    OwnedTensor rows = rank.dispatcher.allocate_rows(plan, DType::kF32);
    const void* const first = rows.view.data;
    const auto num_bytes = static_cast<size_t>(rows.view.num_bytes());
    wait_for_thread_stream();
    StreamGate gate(cudaStreamPerThread);
    cuda_ok(cudaMemsetAsync(rows.view.data, 0x11, num_bytes, cudaStreamPerThread));
    rows = {};
    OwnedTensor again;
    on_other_thread([&] {
      again = rank.dispatcher.allocate_rows(plan, DType::kF32);
      cuda_ok(cudaMemsetAsync(again.view.data, 0x22, num_bytes, cudaStreamPerThread));
      wait_a_little();
      gate.open();
      wait_for_thread_stream();
    });
    wait_for_thread_stream();
    EXPECT_EQ(again.view.data, first);
    EXPECT_EQ(to_host(again.view, rank.stream), std::vector<std::byte>(num_bytes, std::byte{0x22}));
    again = {};
    rank.dispatcher.set_device_options({.stream = rank.stream.view()});
  });
}

// Work that a thread queues after a call waits for it, and a call waits for work queued before.
TEST_F(CudaPerThread, CallsAreInTheOrderOfTheThreadsStream) {
  const DispatchCase the_case = random_case(config_with_room(), {30, 50}, 94);
  run_ranks(
      2,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        const RankTensors host = tensors_of(the_case.config, the_case.ranks[r], DType::kF32);
        const RankStream setup(group);
        const DeviceTensors tensors(host, setup);
        const OwnedTensor x = device_tensor(DType::kF32, tensors.x.view.shape, setup);
        const OwnedTensor copy = device_tensor(DType::kF32, tensors.x.view.shape, setup);
        Dispatcher dispatcher(group, the_case.config, "direct");
        setup.synchronize();
        const auto num_bytes = static_cast<size_t>(x.view.num_bytes());
        for (int step = 0; step < 3; ++step) {
          std::optional<StreamGate> gate;
          if (step > 0) gate.emplace(cudaStreamPerThread);
          cuda_ok(cudaMemcpyAsync(x.view.data, tensors.x.view.data, num_bytes,
                                  cudaMemcpyDeviceToDevice, cudaStreamPerThread));
          const Plan plan = dispatcher.plan(tensors.routing());
          const DispatchResult moved = dispatcher.dispatch(plan, {.x = x.view});
          const OwnedTensor out = dispatcher.combine(plan, moved.rows.view);
          cuda_ok(cudaMemcpyAsync(copy.view.data, out.view.data, num_bytes,
                                  cudaMemcpyDeviceToDevice, cudaStreamPerThread));
          wait_a_little();
          if (gate) gate->open();
          wait_for_thread_stream();
          EXPECT_EQ(to_host(copy.view, setup), wanted.out);
          cuda_ok(cudaMemsetAsync(x.view.data, 0xff, num_bytes, cudaStreamPerThread));
        }
        wait_for_thread_stream();
        dispatcher.check();
      },
      short_deadlines());
}

// The stand-in for the thread's stream joins its capture.
TEST_F(CudaPerThread, IsCapturedAndReplayed) {
  const DispatchCase the_case = random_case(config_with_room(), {30}, 95);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    rank.dispatcher.set_device_options({.stream = per_thread()});
    rank.stream.synchronize();
    { const QueuedStep warm(rank.dispatcher, rank.tensors); }
    wait_for_thread_stream();
    cuda_ok(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeGlobal));
    std::optional<QueuedStep> queued;
    queued.emplace(rank.dispatcher, rank.tensors);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cuda_ok(cudaStreamEndCapture(cudaStreamPerThread, &graph));
    cuda_ok(cudaGraphInstantiate(&executable, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
    for (int replay = 0; replay < 2; ++replay) {
      cuda_ok(cudaGraphLaunch(executable, cudaStreamPerThread));
      wait_for_thread_stream();
      expect_same(queued->wait(rank.stream), wanted);
    }
    cuda_ok(cudaGraphExecDestroy(executable));
    rank.dispatcher.check();
    queued.reset();
    rank.dispatcher.set_device_options({.stream = rank.stream.view()});
  });
}

}  // namespace
}  // namespace crossdock
