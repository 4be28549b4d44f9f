// A caller's mistake with tensors on a GPU is the same error on all ranks before anything is
// queued, and the next step works.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaRefusals = CudaTest;

DispatchCase small_case() {
  return random_case({.num_experts = 6, .top_k = 2, .width = 16}, {9, 7}, 50);
}

// The same tensor with something wrong.
template <typename View>
View on_device(View tensor, Device device) {
  tensor.device = device;
  return tensor;
}
ConstTensorView of_dtype(ConstTensorView tensor, DType dtype) {
  tensor.dtype = dtype;
  return tensor;
}

constexpr Device kHost{};
constexpr Device kOtherGpu{.kind = DeviceKind::kCuda, .index = 7};

void expect_next_step_works(GpuRank& rank, const StepBytes& wanted) {
  const QueuedStep next(rank.dispatcher, rank.tensors);
  expect_same(next.wait(rank.stream), wanted);
  rank.dispatcher.check();
}

// A call with correct or wrong tensors.
using AnyCall = std::function<void(GpuRank& rank, const Plan& plan, bool is_wrong)>;

// Rank 1 makes the call with a mistake, rank 0 without; both get rank 1's error.
void expect_refusal(const std::string& strategy, const std::string& text, const AnyCall& call) {
  SCOPED_TRACE(strategy + ": " + text);
  run_on_gpu(small_case(), {.strategy = strategy}, [&](GpuRank& rank, const StepBytes& wanted) {
    const Plan plan = rank.plan();
    const bool is_wrong = rank.group.rank() == 1;
    EXPECT_THAT(message_of([&] { call(rank, plan, is_wrong); }), HasSubstr("rank 1: " + text));
    expect_next_step_works(rank, wanted);
  });
}

const char* const kStrategies[] = {"direct", "alltoall"};

// The GPU of the rank that makes the mistake: "GPU 1" if there are several.
std::string gpu_of_rank_1() {
  return "GPU " + std::to_string(1 % cuda_device_count());
}

TEST_F(CudaRefusals, ATensorThatIsNotOnThePlansGpu) {
  for (const char* strategy : kStrategies) {
    expect_refusal(
        strategy,
        "x must be on " + gpu_of_rank_1() + ", as the first routing was; it is in host memory",
        [](GpuRank& rank, const Plan& plan, bool is_wrong) {
          const TensorView& x = rank.tensors.x.view;
          rank.dispatcher.dispatch(plan, {.x = is_wrong ? on_device(x, kHost) : x});
        });
    expect_refusal(
        strategy,
        "out must be on " + gpu_of_rank_1() + ", as the first routing was; it is on GPU 7",
        [](GpuRank& rank, const Plan& plan, bool is_wrong) {
          const OwnedTensor y = rank.dispatcher.allocate_rows(plan, DType::kF32);
          const TensorView& out = rank.tensors.grad_out.view;
          rank.dispatcher.combine(plan, y.view, is_wrong ? on_device(out, kOtherGpu) : out);
        });
    expect_refusal(strategy, "weights must be on " + gpu_of_rank_1(),
                   [](GpuRank& rank, const Plan& /*plan*/, bool is_wrong) {
                     Routing routing = rank.tensors.routing();
                     if (is_wrong) routing.weights = on_device(routing.weights, kHost);
                     static_cast<void>(rank.dispatcher.plan(routing));
                   });
  }
}

// The memory that a refused call took belongs to the stream of that call.
TEST_F(CudaRefusals, ARefusedCallKeepsNothingOfAStreamThatIsThenDestroyed) {
  for (const char* strategy : kStrategies) {
    run_on_gpu(small_case(), {.strategy = strategy}, [&](GpuRank& rank, const StepBytes& wanted) {
      cudaStream_t brief = nullptr;
      cuda_ok(cudaStreamCreateWithFlags(&brief, cudaStreamNonBlocking));
      rank.dispatcher.set_device_options({.stream = {brief}});
      {
        const Plan plan = rank.plan();
        const TensorView x = rank.tensors.x.view;
        const bool is_wrong = rank.group.rank() == 1;
        EXPECT_THAT(message_of([&] {
                      rank.dispatcher.dispatch(plan, {.x = is_wrong ? on_device(x, kHost) : x});
                    }),
                    HasSubstr("rank 1: x must be on " + gpu_of_rank_1()));
      }
      cuda_ok(cudaStreamSynchronize(brief));
      rank.dispatcher.set_device_options({.stream = rank.stream.view()});
      cuda_ok(cudaStreamDestroy(brief));
      expect_next_step_works(rank, wanted);
    });
  }
}

TEST_F(CudaRefusals, ATensorOfAWrongDtypeOrShape) {
  for (const char* strategy : kStrategies) {
    expect_refusal(strategy, "rows on a GPU must be fp32, bf16 or fp16, got fp64",
                   [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                     const OwnedTensor y = rank.dispatcher.allocate_rows(plan, DType::kF32);
                     static_cast<void>(rank.dispatcher.combine(
                         plan, is_wrong ? of_dtype(y.view, DType::kF64) : y.view));
                   });
    expect_refusal(strategy, "y and grad_out must have the same dtype, got bf16 and fp32",
                   [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                     const OwnedTensor y =
                         rank.dispatcher.allocate_rows(plan, is_wrong ? DType::kBF16 : DType::kF32);
                     static_cast<void>(rank.dispatcher.combine_backward(
                         plan, rank.tensors.grad_out.view, y.view));
                   });
    expect_refusal(strategy, "rows must be ", [](GpuRank& rank, const Plan& plan, bool is_wrong) {
      const Shape shape{plan.num_rows() + (is_wrong ? 1 : 0)};
      const OwnedTensor rows = device_tensor(DType::kF32, shape, rank.stream);
      static_cast<void>(rank.dispatcher.collect_routes(plan, rows.view));
    });
    expect_refusal(strategy, "weights must be [7, 2] fp32, fp64, bf16 or fp16, got [7, 2] int32",
                   [](GpuRank& rank, const Plan& /*plan*/, bool is_wrong) {
                     Routing routing = rank.tensors.routing();
                     if (is_wrong) routing.weights = of_dtype(routing.weights, DType::kI32);
                     static_cast<void>(rank.dispatcher.plan(routing));
                   });
    expect_refusal(strategy, "scales are for fp8_e4m3 tokens only",
                   [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                     DispatchArgs args{.x = rank.tensors.x.view};
                     if (is_wrong) args.scales = rank.tensors.weights.view;
                     rank.dispatcher.dispatch(plan, args);
                   });
  }
}

TEST_F(CudaRefusals, AnOutputThatOverlapsAnInput) {
  for (const char* strategy : kStrategies) {
    expect_refusal(strategy, "rows overlaps x", [](GpuRank& rank, const Plan& plan, bool is_wrong) {
      const Shape shape{plan.capacity_rows(), 16};
      const OwnedTensor rows = device_tensor(DType::kF32, shape, rank.stream);
      TensorView given = rows.view;
      if (is_wrong) given.data = rank.tensors.x.view.data;
      rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .rows = given});
    });
    expect_refusal(strategy, "out overlaps rows",
                   [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                     const OwnedTensor y = rank.dispatcher.allocate_rows(plan, DType::kF32);
                     TensorView out = rank.tensors.grad_out.view;
                     if (is_wrong) out.data = static_cast<float*>(y.view.data) + 16;
                     rank.dispatcher.combine(plan, y.view, out);
                   });
  }
}

TEST_F(CudaRefusals, OptionsThatCannotBe) {
  for (const char* strategy : kStrategies) {
    expect_refusal(
        strategy, "max_sms must be 0 (all) or more, got -1",
        [](GpuRank& rank, const Plan& plan, bool is_wrong) {
          const Stream stream = rank.stream.view();
          rank.dispatcher.set_device_options({.stream = stream, .max_sms = is_wrong ? -1 : 0});
          const std::optional<Error> error =
              error_of([&] { rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view}); });
          rank.dispatcher.set_device_options({.stream = stream});
          if (error) throw *error;
        });
    expect_refusal(
        strategy, "max_begun_sms must be 0 (max_sms) or more, got -2",
        [](GpuRank& rank, const Plan& plan, bool is_wrong) {
          const Stream stream = rank.stream.view();
          rank.dispatcher.set_device_options(
              {.stream = stream, .max_begun_sms = is_wrong ? -2 : 0});
          const std::optional<Error> error = error_of([&] {
            static_cast<void>(rank.dispatcher.begin_dispatch(plan, {.x = rank.tensors.x.view}));
          });
          rank.dispatcher.set_device_options({.stream = stream});
          if (error) throw *error;
        });
    expect_refusal(strategy, "nccl_comm must be set before the first plan",
                   [](GpuRank& rank, const Plan& /*plan*/, bool is_wrong) {
                     const Stream stream = rank.stream.view();
                     int anything = 0;
                     rank.dispatcher.set_device_options(
                         {.stream = stream, .nccl_comm = is_wrong ? &anything : nullptr});
                     const std::optional<Error> error = error_of([&] { rank.plan(); });
                     rank.dispatcher.set_device_options({.stream = stream});
                     if (error) throw *error;
                   });
  }
}

TEST_F(CudaRefusals, ChunksThatAreNotAlikeOrNone) {
  for (const char* strategy : kStrategies) {
    expect_refusal(strategy, "num_chunks must be at least 1, got 0",
                   [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                     rank.dispatcher.dispatch(
                         plan, {.x = rank.tensors.x.view, .num_chunks = is_wrong ? 0 : 1});
                   });
    run_on_gpu(small_case(), {.strategy = strategy}, [&](GpuRank& rank, const StepBytes& wanted) {
      const Plan plan = rank.plan();
      EXPECT_THAT(message_of([&] {
                    rank.dispatcher.dispatch(
                        plan, {.x = rank.tensors.x.view, .num_chunks = 1 + rank.group.rank()});
                  }),
                  HasSubstr("num_chunks=2"));
      expect_next_step_works(rank, wanted);
    });
  }
}

TEST_F(CudaRefusals, AnExceptionOfOnChunkIsTheSameErrorEverywhere) {
  run_on_gpu(small_case(), {}, [&](GpuRank& rank, const StepBytes& /*wanted*/) {
    const Plan plan = rank.plan();
    const auto on_chunk = [&](const DispatchResult&, const DispatchChunk&) {
      if (rank.group.rank() == 1) throw std::runtime_error("a fault");
    };
    EXPECT_THAT(message_of([&] {
                  rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .on_chunk = on_chunk});
                }),
                HasSubstr("a fault"));
    EXPECT_TRUE(rank.group.is_poisoned());
  });
}

TEST_F(CudaRefusals, ARankWhoseRoutingIsNotOnAGpu) {
  const DispatchCase the_case = small_case();
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const auto r = static_cast<size_t>(rank.group.rank());
    const RankTensors host = tensors_of(the_case.config, the_case.ranks[r], DType::kF32);
    EXPECT_THAT(
        message_of([&] {
          static_cast<void>(rank.dispatcher.plan(r == 0 ? host.routing() : rank.tensors.routing()));
        }),
        HasSubstr("device=cuda"));
    expect_next_step_works(rank, wanted);
  });
}

TEST_F(CudaRefusals, ARoutingOnAGpuThatIsNotThere) {
  for (const char* strategy : kStrategies) {
    run_on_gpu(small_case(), {.strategy = strategy}, [&](GpuRank& rank, const StepBytes& wanted) {
      Routing routing = rank.tensors.routing();
      if (rank.group.rank() == 1)
        routing.expert_ids = on_device(routing.expert_ids, {kOtherGpu.kind, 99});
      EXPECT_THAT(message_of([&] { static_cast<void>(rank.dispatcher.plan(routing)); }),
                  HasSubstr("the tensors are on GPU 99, but the number of GPUs is "));
      expect_next_step_works(rank, wanted);
    });
  }
}

TEST_F(CudaRefusals, ThePlanOfAnotherDispatcher) {
  const DispatchCase the_case = small_case();
  const char* const text = "the plan was made by another dispatcher";
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const TensorView x = rank.tensors.x.view;
    GpuRank same(rank.group, the_case, {});
    GpuRank other(rank.group, the_case, {.strategy = "alltoall"});
    const Plan plan = rank.plan();
    const Plan same_plan = same.plan();
    const Plan other_plan = other.plan();
    for (const Plan& foreign : {same_plan, other_plan}) {
      EXPECT_THAT(message_of([&] { rank.dispatcher.dispatch(foreign, {.x = x}); }),
                  HasSubstr(text));
    }
    for (const Plan& foreign : {plan, other_plan}) {
      EXPECT_THAT(message_of([&] { same.dispatcher.dispatch(foreign, {.x = x}); }),
                  HasSubstr(text));
      EXPECT_THAT(message_of([&] { static_cast<void>(same.dispatcher.combine(foreign, x)); }),
                  HasSubstr(text));
    }
    const DispatchResult moved = same.dispatcher.dispatch(same_plan, {.x = x});
    EXPECT_EQ(to_host(moved.rows.view, same_plan.num_rows(), same.stream), wanted.rows);
    expect_next_step_works(rank, wanted);
  });
}

}  // namespace
}  // namespace crossdock
