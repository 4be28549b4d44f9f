// Dense maps with any number of bits, and weights of any float type, on the GPU: bit-identical to
// the CPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <random>

#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaDenseMap = CudaTest;

constexpr DType kWeightDtypes[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};

DispatchConfig small_config() {
  return {.num_experts = 37, .top_k = 3, .width = 24};
}

/// One rank's map. Weights are sixteenths, exact in every dtype, and NaN where no bit is set.
struct DenseValues {
  std::vector<double> map;      // [T, E]
  std::vector<double> weights;  // [T, E]
};

DenseValues random_map(int64_t num_experts, int64_t T, unsigned seed) {
  std::mt19937 random(seed);
  DenseValues values;
  for (int64_t t = 0; t < T; ++t) {
    const auto density = static_cast<double>(t % 5) / 4.0;  // none to all
    for (int64_t e = 0; e < num_experts; ++e) {
      const bool is_set = static_cast<double>(random() % 64) < density * 64.0;
      values.map.push_back(is_set ? 1.0 : 0.0);
      const double weight = (static_cast<double>(random() % 17) - 8.0) / 16.0;
      values.weights.push_back(is_set ? weight : std::numeric_limits<double>::quiet_NaN());
    }
  }
  return values;
}

/// A rank's map as tensors, with the mask of its case.
struct DenseTensors {
  OwnedTensor map;
  OwnedTensor weights;

  DenseTensors(const DenseValues& values, int64_t num_experts, DType dtype)
      : DenseTensors(values, {std::ssize(values.map) / num_experts, num_experts}, dtype) {}
  DenseTensors(const DenseValues& values, const Shape& shape, DType dtype)
      : map(reference::to_tensor(DType::kBool, shape, values.map)),
        weights(reference::to_tensor(dtype, shape, values.weights)) {}
  DenseTensors(const DenseTensors& host, const RankStream& stream)
      : map(to_device(host.map.view, stream)), weights(to_device(host.weights.view, stream)) {}

  DenseRouting routing(const OwnedTensor& mask) const {
    return {.map = map.view, .weights = weights.view, .mask = mask.view};
  }
};

/// One rank with a dense map: on the GPU, and the step of the CPU.
struct DenseRank {
  GpuRank& gpu;
  DenseTensors tensors;
  StepBytes wanted;

  DenseRank(GpuRank& rank, const DispatchCase& the_case, const GpuSetting& setting,
            DType weight_dtype)
      : gpu(rank), tensors(map_of(rank, the_case, weight_dtype), rank.stream) {
    const RankTensors host = tensors_of(
        the_case.config, the_case.ranks[static_cast<size_t>(gpu.group.rank())], setting.dtype);
    const DenseTensors map = map_of(rank, the_case, DType::kF32);
    Dispatcher on_cpu(gpu.group, the_case.config, "direct");
    wanted = cpu_step(on_cpu, on_cpu.plan(map.routing(host.mask)), host);
    gpu.stream.synchronize();  // before the copies' sources are freed
  }

  static DenseTensors map_of(const GpuRank& rank, const DispatchCase& the_case, DType dtype) {
    const auto r = static_cast<size_t>(rank.group.rank());
    const int64_t E = the_case.config.num_experts;
    return {random_map(E, the_case.ranks[r].T, static_cast<unsigned>(r + 1)), E, dtype};
  }

  Plan plan() { return gpu.dispatcher.plan(tensors.routing(gpu.tensors.mask)); }
  QueuedStep step() { return {gpu.dispatcher, plan(), gpu.tensors}; }
};

void run_dense(const DispatchCase& the_case, const GpuSetting& setting, DType weight_dtype,
               const std::function<void(DenseRank&)>& body) {
  run_on_gpu(the_case, setting, [&](GpuRank& rank, const StepBytes& /*of slots*/) {
    DenseRank dense(rank, the_case, setting, weight_dtype);
    body(dense);
  });
}

TEST_F(CudaDenseMap, GivesTheBitsOfTheCpuForAnyNumberOfBits) {
  const DispatchCase the_case = random_case(small_config(), {40, 0, 77, 13}, 70);
  for (const char* strategy : {"direct", "alltoall", "allgather"}) {
    for (const DType weight_dtype : kWeightDtypes) {
      SCOPED_TRACE(std::string(strategy) + " " + std::string(name_of(weight_dtype)));
      run_dense(the_case, {.dtype = DType::kBF16, .strategy = strategy}, weight_dtype,
                [](DenseRank& rank) {
                  for (int step = 0; step < 2; ++step) {
                    expect_same(rank.step().wait(rank.gpu.stream), rank.wanted);
                  }
                  rank.gpu.dispatcher.check();
                });
    }
  }
}

TEST_F(CudaDenseMap, GivesTheBitsOfTheCpuForManyTokens) {
  DispatchConfig config = small_config();
  config.alignment = 16;
  config.capacity = Capacity{.factor = 1.3};
  run_dense(random_case(config, {3000, 1, 2000}, 71), {}, DType::kF32, [](DenseRank& rank) {
    expect_same(rank.step().wait(rank.gpu.stream), rank.wanted);
    rank.gpu.dispatcher.check();
  });
}

// During a capture, calls that wait are errors.
TEST_F(CudaDenseMap, WithBoundsIsPlannedWithoutHostSync) {
  DispatchConfig config = small_config();
  config.max_routes_per_token = config.num_experts;
  config.max_rows = 2 * 50 * config.num_experts;
  const DispatchCase the_case = random_case(config, {30, 50}, 72);
  for (const DType weight_dtype : kWeightDtypes) {
    SCOPED_TRACE(std::string(name_of(weight_dtype)));
    run_dense(the_case, {}, weight_dtype, [](DenseRank& rank) {
      std::optional<QueuedStep> queued;
      const CapturedGraph graph(
          rank.gpu, [&] { queued.emplace(rank.step()); }, cudaStreamCaptureModeGlobal);
      for (int replay = 0; replay < 3; ++replay) {
        graph.launch();
        expect_same(queued->wait(rank.gpu.stream), rank.wanted);
      }
      rank.gpu.dispatcher.check();
    });
  }
}

TEST_F(CudaDenseMap, WithoutABoundCannotBeCaptured) {
  DispatchConfig config = small_config();
  config.max_rows = 8000;
  run_dense(random_case(config, {30, 50}, 73), {}, DType::kF32, [](DenseRank& rank) {
    std::string message;
    const CapturedGraph graph(
        rank.gpu, [&] { message = message_of([&] { static_cast<void>(rank.plan()); }); });
    EXPECT_THAT(message, HasSubstr("needs max_routes_per_token in the configuration"));
    expect_same(rank.step().wait(rank.gpu.stream), rank.wanted);
  });
}

// Rank 1's token 2 has 4 bits; the error comes at the next call, the same on all ranks.
TEST_F(CudaDenseMap, BeyondItsBoundIsNamedOnAllRanks) {
  const DispatchConfig config{
      .num_experts = 6, .top_k = 2, .width = 16, .max_rows = 100, .max_routes_per_token = 3};
  const DispatchCase the_case = random_case(config, {9, 7}, 74);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const int64_t T = the_case.ranks[static_cast<size_t>(rank.group.rank())].T;
    DenseValues values{.map = std::vector<double>(static_cast<size_t>(T * 6), 0.0), .weights = {}};
    values.weights = values.map;
    for (size_t e = 1; rank.group.rank() == 1 && e < 5; ++e) values.map[2 * 6 + e] = 1.0;
    const DenseTensors host(values, 6, DType::kF32);
    const DenseTensors tensors(host, rank.stream);
    rank.stream.synchronize();
    const Plan plan = rank.dispatcher.plan(tensors.routing({}));
    if (rank.group.rank() == 0) rank.stream.synchronize();  // the others may not know yet
    const std::optional<Error> error =
        error_of([&] { rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view}); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(
        error->what(),
        HasSubstr("rank 1: token 2: 4 experts are set, at most max_routes_per_token (3) may be"));
    const QueuedStep next(rank.dispatcher, rank.tensors);
    EXPECT_EQ(next.wait(rank.stream).out, wanted.out);
    rank.dispatcher.check();
  });
}

// All ranks of a plan have the same number of slots per token.
TEST_F(CudaDenseMap, OnOneRankAndSlotsOnAnotherIsAMismatch) {
  DispatchConfig config = small_config();
  config.max_routes_per_token = 5;
  run_on_gpu(random_case(config, {9, 7}, 76), {}, [](GpuRank& rank, const StepBytes& wanted) {
    const auto num_values = static_cast<size_t>(7 * small_config().num_experts);
    const DenseValues empty{.map = std::vector<double>(num_values, 0.0),
                            .weights = std::vector<double>(num_values, 0.0)};
    const DenseTensors host(empty, small_config().num_experts, DType::kF32);
    const DenseTensors tensors(host, rank.stream);
    rank.stream.synchronize();
    const std::optional<Error> error = error_of([&] {
      static_cast<void>(rank.group.rank() == 0 ? rank.dispatcher.plan(rank.tensors.routing())
                                               : rank.dispatcher.plan(tensors.routing({})));
    });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kMismatch);
    EXPECT_THAT(error->what(), HasSubstr("slots"));
    const QueuedStep next(rank.dispatcher, rank.tensors);
    EXPECT_EQ(next.wait(rank.stream).out, wanted.out);
  });
}

TEST_F(CudaDenseMap, WeightsBySlotMayHaveAnyFloatType) {
  const DispatchCase the_case = random_case(small_config(), {40, 0, 77}, 75);
  for (const char* strategy : {"direct", "alltoall"}) {
    for (const DType weight_dtype : kWeightDtypes) {
      SCOPED_TRACE(std::string(strategy) + " " + std::string(name_of(weight_dtype)));
      run_on_gpu(the_case, {.strategy = strategy}, [&](GpuRank& rank, const StepBytes& wanted) {
        const reference::RankInput& input = the_case.ranks[static_cast<size_t>(rank.group.rank())];
        const OwnedTensor weights =
            reference::to_tensor(weight_dtype, {input.T, the_case.config.top_k}, input.weights);
        const OwnedTensor there = to_device(weights.view, rank.stream);
        rank.stream.synchronize();
        Routing routing = rank.tensors.routing();
        routing.weights = there.view;
        const QueuedStep step(rank.dispatcher, rank.dispatcher.plan(routing), rank.tensors);
        expect_same(step.wait(rank.stream), wanted);
      });
    }
  }
}

}  // namespace
}  // namespace crossdock
