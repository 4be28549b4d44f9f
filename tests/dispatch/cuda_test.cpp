// Tensors of the GPU, with no host sync where max_rows is given.

#include "crossdock/cuda.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>

#include "crossdock/fp8.hpp"
#include "dispatch/cuda_step.hpp"

namespace crossdock {
namespace {

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  }
};

using CudaDispatcher = Cuda;

DispatchConfig small_config() {
  return {.num_experts = 11, .top_k = 3, .width = 40};
}

void expect_same(const StepBytes& got, const StepBytes& wanted) {
  EXPECT_EQ(got.rows, wanted.rows);
  EXPECT_EQ(got.row_weights, wanted.row_weights);
  EXPECT_EQ(got.out, wanted.out);
  EXPECT_EQ(got.grad_x, wanted.grad_x);
  EXPECT_EQ(got.grad_rows, wanted.grad_rows);
  EXPECT_EQ(got.grad_weights, wanted.grad_weights);  // sums of small integers: exact
}

void expect_bits_of_the_cpu(const DispatchCase& the_case, DType dtype, DeviceOptions options = {}) {
  run_ranks(
      static_cast<int>(the_case.ranks.size()),
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, the_case, dtype);
        const RankStream stream;
        const DeviceTensors tensors(tensors_of(the_case.config, the_case.ranks[r], dtype), stream);
        Dispatcher dispatcher(group, the_case.config, "direct");
        options.stream = stream.view();
        dispatcher.set_device_options(options);
        for (int step = 0; step < 3; ++step) {
          const QueuedStep queued(dispatcher, tensors);
          expect_same(queued.wait(stream), wanted);
        }
        dispatcher.check();
      },
      short_deadlines());
}

TEST_F(CudaDispatcher, GivesTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    expect_bits_of_the_cpu(random_case(small_config(), {5, 0, 33, 17}, 1), dtype);
  }
}

TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuWithoutHostSync) {
  DispatchConfig config = small_config();
  config.max_rows = 160;
  expect_bits_of_the_cpu(random_case(config, {5, 0, 33, 17}, 2), DType::kBF16);
}

TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuForManyTokensAndOddWidths) {
  DispatchConfig config{.num_experts = 13, .top_k = 5, .width = 7, .alignment = 32};
  expect_bits_of_the_cpu(random_case(config, {3000, 1, 5000}, 3), DType::kBF16);
  config.width = 1030;
  config.top_k = 12;
  expect_bits_of_the_cpu(random_case(config, {700, 900}, 4), DType::kF32);
}

TEST_F(CudaDispatcher, GivesTheSameBitsOnFewMultiprocessors) {
  expect_bits_of_the_cpu(random_case(small_config(), {500, 300}, 5), DType::kBF16, {.max_sms = 2});
}

TEST_F(CudaDispatcher, PutsRowsIntoTheCallersMemory) {
  const DispatchCase the_case = random_case(small_config(), {20, 30}, 6);
  run_ranks(
      2,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        const RankStream stream;
        const DeviceTensors tensors(tensors_of(the_case.config, the_case.ranks[r], DType::kF32),
                                    stream);
        Dispatcher dispatcher(group, the_case.config, "direct");
        dispatcher.set_device_options({.stream = stream.view()});
        const Plan plan = dispatcher.plan(tensors.routing());
        const OwnedTensor rows =
            device_tensor(DType::kF32, {plan.num_rows(), the_case.config.width}, stream);
        dispatcher.dispatch(plan, {.x = tensors.x.view, .rows = rows.view});
        EXPECT_EQ(to_host(rows.view, stream), wanted.rows);
      },
      short_deadlines());
}

TEST_F(CudaDispatcher, CollectsOneNumberPerRoute) {
  const DispatchCase the_case = random_case(small_config(), {20, 30, 10}, 7);
  run_ranks(
      3,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const RankStream stream;
        const DeviceTensors tensors(tensors_of(the_case.config, the_case.ranks[r], DType::kF32),
                                    stream);
        Dispatcher dispatcher(group, the_case.config, "direct");
        dispatcher.set_device_options({.stream = stream.view()});
        const Plan plan = dispatcher.plan(tensors.routing());
        const DispatchResult moved =
            dispatcher.dispatch(plan, {.x = tensors.x.view, .with_row_weights = true});
        // The weights went out; they must come home as they were.
        const OwnedTensor home = dispatcher.collect_routes(plan, moved.row_weights.view);
        EXPECT_EQ(to_host(home.view, stream), to_host(plan.weights(), stream));
      },
      short_deadlines());
}

TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuWhereRanksAwaitEachOtherInKernels) {
  expect_bits_of_the_cpu(random_case(small_config(), {500, 0, 300, 77}, 10), DType::kBF16,
                         {.max_sms = 20});
}

// Steps of two plans, the second begun before the first ends.
TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuWhereCallsBeginBeforeOthersEnd) {
  const DispatchCase first = random_case(small_config(), {50, 0, 30}, 11);
  const DispatchCase second = random_case(small_config(), {20, 40, 9}, 12);
  run_ranks(
      3,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted_first = cpu_step(group, first, DType::kBF16);
        const StepBytes wanted_second = cpu_step(group, second, DType::kBF16);
        const RankStream stream;
        const DeviceTensors a(tensors_of(first.config, first.ranks[r], DType::kBF16), stream);
        const DeviceTensors b(tensors_of(second.config, second.ranks[r], DType::kBF16), stream);
        Dispatcher dispatcher(group, first.config, "direct");
        dispatcher.set_device_options({.stream = stream.view()});
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
      },
      short_deadlines());
}

// Rank 1 comes late to a dispatch: its stream fills memory first. What rank 0 queues after it
// begins does not wait for that.
TEST_F(CudaDispatcher, RunsBegunCallsBesideTheStream) {
  const DispatchCase the_case = random_case(small_config(), {20, 30}, 13);
  run_ranks(
      2,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        const RankStream stream;
        const DeviceTensors tensors(tensors_of(the_case.config, the_case.ranks[r], DType::kF32),
                                    stream);
        Dispatcher dispatcher(group, the_case.config, "direct");
        dispatcher.set_device_options({.stream = stream.view()});
        const Plan plan = dispatcher.plan(tensors.routing());
        const OwnedTensor rows =
            device_tensor(DType::kF32, {plan.num_rows(), the_case.config.width}, stream);
        const OwnedTensor filled = device_tensor(DType::kU8, {int64_t{4} << 30}, stream);
        const DispatchArgs args{.x = tensors.x.view, .rows = rows.view};
        dispatcher.finish(dispatcher.begin_dispatch(plan, args));  // sets up
        stream.synchronize();
        constexpr int kAttempts = 4;  // the driver may hold a stream up for reasons of its own
        constexpr int kFills = 100;   // about a millisecond each
        bool has_overlapped = false;
        for (int attempt = 0; attempt < kAttempts; ++attempt) {
          for (int i = 0; group.rank() == 1 && i < kFills; ++i) {
            cuda_ok(cudaMemsetAsync(filled.view.data, i, size_t{4} << 30, stream.get()));
          }
          const auto begin = std::chrono::steady_clock::now();
          const auto passed = [&] { return std::chrono::steady_clock::now() - begin; };
          Pending<DispatchResult> pending = dispatcher.begin_dispatch(plan, args);
          if (group.rank() == 0) stream.synchronize();
          const auto until_stream = passed();
          const DispatchResult moved = dispatcher.finish(std::move(pending));
          EXPECT_EQ(to_host(moved.rows.view, stream), wanted.rows);
          has_overlapped = has_overlapped || until_stream < passed() / 2;
        }
        EXPECT_TRUE(has_overlapped || group.rank() != 0);
      },
      short_deadlines());
}

TEST_F(CudaDispatcher, MovesFp8WithScalesAndMakesBf16OfIt) {
  DispatchConfig config{.num_experts = 6, .top_k = 2, .width = 300};
  const DispatchCase the_case = random_case(config, {40, 25}, 8);
  for (const DType scale_dtype : {DType::kF32, DType::kE8M0}) {
    run_ranks(
        2,
        [&](Group& group) {
          const auto r = static_cast<size_t>(group.rank());
          const int64_t T = the_case.ranks[r].T;
          const RankTensors host = tensors_of(config, the_case.ranks[r], DType::kF32);
          const int64_t num_scales = 300 / fp8_group_size(scale_dtype) + 1;
          Buffer x(T * config.width);
          Buffer scales(T * num_scales * size_of(scale_dtype));
          std::mt19937 random(9);
          for (std::byte& value : x.bytes()) value = static_cast<std::byte>(random() & 0x7e);
          // Any bytes between 2^-15 and 2^16 as e8m0; as fp32 0x70707070 and the like are finite.
          for (std::byte& value : scales.bytes()) {
            value = static_cast<std::byte>(0x70 + random() % 16);
          }
          const ConstTensorView x_view = x.view(DType::kF8E4M3, {T, config.width});
          const ConstTensorView scale_view = scales.view(scale_dtype, {T, num_scales});
          Dispatcher on_cpu(group, config, "direct");
          const Plan cpu_plan = on_cpu.plan(host.routing());
          const DispatchResult wanted =
              on_cpu.dispatch(cpu_plan, {.x = x_view, .scales = scale_view});
          const Shape shape{cpu_plan.num_rows(), config.width};
          const Buffer wanted_rows(shape.num_elements() * 2);
          fp8_to_bf16({.rows = wanted.rows.view,
                       .scales = wanted.row_scales.view,
                       .out = wanted_rows.view(DType::kBF16, shape)});

          const RankStream stream;
          const DeviceTensors tensors(host, stream);
          const OwnedTensor x_there = to_device(x_view, stream);
          const OwnedTensor scales_there = to_device(scale_view, stream);
          Dispatcher dispatcher(group, config, "direct");
          dispatcher.set_device_options({.stream = stream.view()});
          const Plan plan = dispatcher.plan(tensors.routing());
          const DispatchResult moved =
              dispatcher.dispatch(plan, {.x = x_there.view, .scales = scales_there.view});
          const OwnedTensor rows = device_tensor(DType::kBF16, shape, stream);
          fp8_to_bf16({.rows = moved.rows.view,
                       .scales = moved.row_scales.view,
                       .out = rows.view,
                       .stream = stream.view()});
          EXPECT_EQ(to_host(moved.rows.view, stream), bytes_of(wanted.rows.view));
          EXPECT_EQ(to_host(moved.row_scales.view, stream), bytes_of(wanted.row_scales.view));
          EXPECT_EQ(to_host(rows.view, stream), bytes_of(wanted_rows.view(DType::kBF16, shape)));
        },
        short_deadlines());
  }
}

// More than 2^31 elements in x, rows and out.
TEST_F(CudaDispatcher, ReachesBeyondTwoBillionElements) {
  constexpr int64_t kTokens = 70000;
  constexpr int64_t kWidth = 32768;
  constexpr int64_t kStep = 9973;
  run_ranks(1, [&](Group& group) {
    const RankStream stream;
    const OwnedTensor x = device_tensor(DType::kBF16, {kTokens, kWidth}, stream);
    const auto row_bytes = static_cast<size_t>(x.view.row_bytes());
    const auto row = [&](const TensorView& tensor, int64_t t) {
      return static_cast<std::byte*>(tensor.data) + t * static_cast<int64_t>(row_bytes);
    };
    cuda_ok(cudaMemsetAsync(x.view.data, 0, row_bytes * kTokens, stream.get()));
    const auto mark = [](int64_t t) { return static_cast<int>(t % 100 + 1); };
    for (int64_t t = kTokens - 1; t >= 0; t -= kStep) {
      cuda_ok(cudaMemsetAsync(row(x.view, t), mark(t), row_bytes, stream.get()));
    }
    const std::vector<int32_t> ids(kTokens, 0);
    const std::vector<float> weights(kTokens, 1.0F);
    const OwnedTensor ids_there = to_device({ids.data(), {kTokens, 1}}, stream);
    const OwnedTensor weights_there = to_device({weights.data(), {kTokens, 1}}, stream);
    Dispatcher dispatcher(group, {.num_experts = 1, .top_k = 1, .width = kWidth}, "direct");
    dispatcher.set_device_options({.stream = stream.view()});
    const Plan plan = dispatcher.plan(Routing{ids_there.view, weights_there.view, {}});
    const DispatchResult moved = dispatcher.dispatch(plan, {.x = x.view});
    const OwnedTensor out = dispatcher.combine(plan, moved.rows.view);
    for (const TensorView& tensor : {moved.rows.view, out.view}) {
      for (int64_t t = kTokens - 1; t >= 0; t -= kStep) {
        std::vector<unsigned char> bytes(row_bytes);
        cuda_ok(cudaMemcpyAsync(bytes.data(), row(tensor, t), row_bytes, cudaMemcpyDeviceToHost,
                                stream.get()));
        stream.synchronize();
        EXPECT_EQ(bytes, std::vector<unsigned char>(row_bytes, static_cast<unsigned char>(mark(t))))
            << "token " << t;
      }
    }
  });
}

}  // namespace
}  // namespace crossdock
