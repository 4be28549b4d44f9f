// Tensors on the GPU; no host sync with max_rows.

#include <gtest/gtest.h>

#include "crossdock/fp8.hpp"
#include "crossdock/tensor.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using CudaDispatcher = CudaTest;

DispatchConfig small_config() {
  return {.num_experts = 11, .top_k = 3, .width = 40};
}

void expect_bits_of_the_cpu(const DispatchCase& the_case, const GpuSetting& setting) {
  run_on_gpu(the_case, setting, [&](GpuRank& rank, const StepBytes& wanted) {
    for (int step = 0; step < 3; ++step) {
      const QueuedStep queued(rank.dispatcher, rank.tensors);
      expect_same(queued.wait(rank.stream), wanted);
    }
    rank.dispatcher.check();
  });
}

TEST_F(CudaDispatcher, GivesTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    expect_bits_of_the_cpu(random_case(small_config(), {5, 0, 33, 17}, 1), {.dtype = dtype});
  }
}

TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuWithoutHostSync) {
  DispatchConfig config = small_config();
  config.max_rows = 160;
  expect_bits_of_the_cpu(random_case(config, {5, 0, 33, 17}, 2), {.dtype = DType::kBF16});
}

TEST_F(CudaDispatcher, ASecondDispatchOfAPlanLeavesTheRowsOfTheFirstAlone) {
  DispatchConfig config = small_config();
  config.max_rows = 160;
  run_on_gpu(random_case(config, {5, 0, 33, 17}, 2), {.dtype = DType::kBF16},
             [&](GpuRank& rank, const StepBytes& wanted) {
               const Plan plan = rank.dispatcher.plan(rank.tensors.routing());
               const DispatchResult first =
                   rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view});
               const DispatchResult second =
                   rank.dispatcher.dispatch(plan, {.x = rank.tensors.grad_out.view});
               EXPECT_EQ(to_host(first.rows.view, plan.num_rows(), rank.stream), wanted.rows);
             });
}

TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuForManyTokensAndOddWidths) {
  DispatchConfig config{.num_experts = 13, .top_k = 5, .width = 7, .alignment = 32};
  expect_bits_of_the_cpu(random_case(config, {3000, 1, 5000}, 3), {.dtype = DType::kBF16});
  config.width = 1030;
  config.top_k = 12;
  expect_bits_of_the_cpu(random_case(config, {700, 900}, 4), {.dtype = DType::kF32});
}

// Up to 2048 routes are counted and placed by one block, more by several.
TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuWhereOneBlockOrSeveralCount) {
  const DispatchConfig config{.num_experts = 70, .top_k = 4, .width = 24};
  expect_bits_of_the_cpu(random_case(config, {512, 513, 1, 2000}, 16), {.dtype = DType::kBF16});
}

// Their rows are summed in parts.
TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuForAFewWideTokens) {
  for (const int64_t top_k : {2, 4, 7, 9}) {
    const DispatchConfig config{.num_experts = 11, .top_k = top_k, .width = 4104};
    expect_bits_of_the_cpu(random_case(config, {1, 0, 13}, 17), {.dtype = DType::kBF16});
    expect_bits_of_the_cpu(random_case(config, {1, 0, 13}, 17),
                           {.dtype = DType::kF32, .options = {.max_sms = 4}});
  }
}

// Their counts need more shared memory than a block has by default; above 8192 the host plans.
TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuForThousandsOfExperts) {
  for (const int64_t E : {1707, 5000, 8192, 9000}) {
    const DispatchConfig config{.num_experts = E, .top_k = 4, .width = 24};
    expect_bits_of_the_cpu(random_case(config, {900, 0, 40}, 6), {.dtype = DType::kBF16});
  }
}

TEST_F(CudaDispatcher, GivesTheSameBitsOnFewMultiprocessors) {
  expect_bits_of_the_cpu(random_case(small_config(), {500, 300}, 5),
                         {.dtype = DType::kBF16, .options = {.max_sms = 2}});
}

TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuWhereRanksAwaitEachOtherInKernels) {
  expect_bits_of_the_cpu(random_case(small_config(), {500, 0, 300, 77}, 10),
                         {.dtype = DType::kBF16, .options = {.max_sms = 20}});
}

// Rows are packed and exchanged; without NCCL ranks copy them out of each other's memory.
TEST_F(CudaDispatcher, GivesTheBitsOfTheCpuByExchanges) {
  for (const char* strategy : {"alltoall", "allgather"}) {
    expect_bits_of_the_cpu(random_case(small_config(), {5, 0, 33, 17}, 14),
                           {.dtype = DType::kBF16, .strategy = strategy});
  }
}

TEST_F(CudaDispatcher, PutsRowsIntoTheCallersMemory) {
  const DispatchCase the_case = random_case(small_config(), {20, 30}, 6);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const Plan plan = rank.plan();
    const OwnedTensor rows =
        device_tensor(DType::kF32, {plan.num_rows(), the_case.config.width}, rank.stream);
    rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .rows = rows.view});
    EXPECT_EQ(to_host(rows.view, rank.stream), wanted.rows);
  });
}

TEST_F(CudaDispatcher, CollectsOneNumberPerRoute) {
  const DispatchCase the_case = random_case(small_config(), {20, 30, 10}, 7);
  for (const char* strategy : {"direct", "alltoall"}) {
    run_on_gpu(the_case, {.strategy = strategy}, [&](GpuRank& rank, const StepBytes& /*wanted*/) {
      const Plan plan = rank.plan();
      const DispatchResult moved =
          rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .with_row_weights = true});
      // The weights were dispatched; they must return unchanged.
      const OwnedTensor home = rank.dispatcher.collect_routes(plan, moved.row_weights.view);
      EXPECT_EQ(to_host(home.view, rank.stream), to_host(plan.weights(), rank.stream));
    });
  }
}

// On a GPU the stream orders the work, so there is one chunk.
TEST_F(CudaDispatcher, AnnouncesAllExpertsAsOneChunk) {
  const DispatchCase the_case = random_case(small_config(), {20, 30}, 15);
  for (const char* strategy : {"direct", "alltoall"}) {
    run_on_gpu(the_case, {.strategy = strategy}, [&](GpuRank& rank, const StepBytes& wanted) {
      const Plan plan = rank.plan();
      int calls = 0;
      const auto on_chunk = [&](const DispatchResult& result, const DispatchChunk& chunk) {
        ++calls;
        EXPECT_EQ(chunk.first_expert, 0);
        EXPECT_EQ(chunk.last_expert, plan.num_local_experts());
        EXPECT_EQ(to_host(result.rows.view, rank.stream), wanted.rows);
        EXPECT_EQ(to_host(result.row_weights.view, rank.stream), wanted.row_weights);
      };
      rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view,
                                      .with_row_weights = true,
                                      .num_chunks = 3,
                                      .on_chunk = on_chunk});
      EXPECT_EQ(calls, 1);
    });
  }
}

TEST_F(CudaDispatcher, MovesFp8WithScalesAndMakesBf16OfIt) {
  // Rows of 304 bytes are moved in vectors of 16 bytes, their scales in smaller ones.
  const std::pair<int64_t, DType> cases[] = {
      {300, DType::kF32}, {300, DType::kE8M0}, {304, DType::kF32}, {304, DType::kE8M0}};
  for (const std::pair<int64_t, DType>& one : cases) {
    const DType scale_dtype = one.second;
    const DispatchConfig config{.num_experts = 6, .top_k = 2, .width = one.first};
    const DispatchCase the_case = random_case(config, {40, 25}, 8);
    run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& /*of fp32*/) {
      const auto r = static_cast<size_t>(rank.group.rank());
      const int64_t T = the_case.ranks[r].T;
      const int64_t num_scales = config.width / fp8_group_size(scale_dtype) + 1;
      Buffer x(T * config.width);
      Buffer scales(T * num_scales * size_of(scale_dtype));
      std::mt19937 random(9);
      for (std::byte& value : x.bytes()) value = static_cast<std::byte>(random() & 0x7e);
      // Any bytes between 2^-15 and 2^16 as e8m0; as fp32 0x70707070 and the like are finite.
      for (std::byte& value : scales.bytes()) value = static_cast<std::byte>(0x70 + random() % 16);
      const ConstTensorView x_view = x.view(DType::kF8E4M3, {T, config.width});
      const ConstTensorView scale_view = scales.view(scale_dtype, {T, num_scales});
      Dispatcher on_cpu(rank.group, config, "direct");
      const Plan cpu_plan =
          on_cpu.plan(tensors_of(config, the_case.ranks[r], DType::kF32).routing());
      const DispatchResult wanted = on_cpu.dispatch(cpu_plan, {.x = x_view, .scales = scale_view});
      const Shape shape{cpu_plan.num_rows(), config.width};
      const Buffer wanted_rows(shape.num_elements() * 2);
      dequantise_rows({.values = wanted.rows.view,
                       .scales = wanted.row_scales.view,
                       .out = wanted_rows.view(DType::kBF16, shape)});

      const OwnedTensor x_there = to_device(x_view, rank.stream);
      const OwnedTensor scales_there = to_device(scale_view, rank.stream);
      const Plan plan = rank.plan();
      const DispatchResult moved =
          rank.dispatcher.dispatch(plan, {.x = x_there.view, .scales = scales_there.view});
      const OwnedTensor rows = device_tensor(DType::kBF16, shape, rank.stream);
      dequantise_rows({.values = moved.rows.view,
                       .scales = moved.row_scales.view,
                       .out = rows.view,
                       .stream = rank.stream.view()});
      EXPECT_EQ(to_host(moved.rows.view, rank.stream), bytes_of(wanted.rows.view));
      EXPECT_EQ(to_host(moved.row_scales.view, rank.stream), bytes_of(wanted.row_scales.view));
      EXPECT_EQ(to_host(rows.view, rank.stream), bytes_of(wanted_rows.view(DType::kBF16, shape)));
    });
  }
}

// More than 2^31 elements in x, rows and out.
TEST_F(CudaDispatcher, ReachesBeyondTwoBillionElements) {
  constexpr int64_t kTokens = 70000;
  constexpr int64_t kWidth = 32768;
  constexpr int64_t kStep = 9973;
  run_ranks(1, [&](Group& group) {
    const RankStream stream(group);
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
