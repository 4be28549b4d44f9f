// Calls in which one rank makes a mistake while the others have run ahead: all ranks get the same
// error later, and the next step works.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/run_ahead_case.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

// A call in which rank 1 makes a mistake; it may queue others first.
using AnyCall = std::function<void(GpuRank& rank, const Plan& plan, bool is_wrong)>;

void expect_late_error(const char* text, const AnyCall& call) {
  SCOPED_TRACE(text);
  run_ahead_on_gpu(case_of({40, 25, 9}, 9), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    expect_steps_work(rank, wanted);  // connects
    const Plan plan = rank.plan();
    const bool is_wrong = rank.group.rank() == 1;
    EXPECT_THAT(late_message(rank, [&] { call(rank, plan, is_wrong); }), HasSubstr(text));
    expect_steps_work(rank, wanted);
  });
}

TEST_F(CudaRunAhead, ARefusedCallIsTheSameErrorOnAllRanksLater) {
  expect_late_error("rank 1: x must be [25, 24], got",
                    [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                      TensorView x = rank.tensors.x.view;
                      if (is_wrong) x.shape = {24, kWidth};
                      rank.dispatcher.dispatch(plan, {.x = x});
                    });
  expect_late_error("rank 1: rows on a GPU must be fp32, bf16 or fp16, got fp64",
                    [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                      const OwnedTensor y = rank.dispatcher.allocate_rows(plan, DType::kF32);
                      TensorView rows = y.view;
                      if (is_wrong) rows.dtype = DType::kF64;
                      static_cast<void>(rank.dispatcher.combine(plan, rows));
                    });
  expect_late_error("rank 1: weights must be on GPU",
                    [](GpuRank& rank, const Plan& /*plan*/, bool is_wrong) {
                      Routing routing = rank.tensors.routing();
                      if (is_wrong) routing.weights.device = {};
                      static_cast<void>(rank.dispatcher.plan(routing));
                    });
  expect_late_error("rank 1: rows must be", [](GpuRank& rank, const Plan& plan, bool is_wrong) {
    const Shape shape{plan.capacity_rows() + (is_wrong ? 1 : 0)};
    const OwnedTensor rows = device_tensor(DType::kF32, shape, rank.stream);
    static_cast<void>(rank.dispatcher.collect_routes(plan, rows.view));
  });
  expect_late_error(
      "rank 1: max_begun_sms must be 0 (max_sms) or more, got -2",
      [](GpuRank& rank, const Plan& plan, bool is_wrong) {
        const Stream stream = rank.stream.view();
        rank.dispatcher.set_device_options({.stream = stream, .max_begun_sms = is_wrong ? -2 : 0});
        const std::optional<Error> error = error_of([&] {
          static_cast<void>(rank.dispatcher.begin_dispatch(plan, {.x = rank.tensors.x.view}));
        });
        rank.dispatcher.set_device_options({.stream = stream});
        if (error) throw *error;
      });
}

TEST_F(CudaRunAhead, SettingsThatDifferAreNamed) {
  expect_late_error("row_weights=", [](GpuRank& rank, const Plan& plan, bool is_wrong) {
    rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .with_row_weights = is_wrong});
  });
  expect_late_error("num_chunks=3", [](GpuRank& rank, const Plan& plan, bool is_wrong) {
    rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view, .num_chunks = is_wrong ? 3 : 1});
  });
}

TEST_F(CudaRunAhead, ARankAtAnotherCallIsNamed) {
  expect_late_error("rank 1 is at combine of plan",
                    [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                      const OwnedTensor y = rank.dispatcher.allocate_rows(plan, DType::kF32);
                      if (is_wrong) {
                        static_cast<void>(rank.dispatcher.combine(plan, y.view));
                      } else {
                        rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view});
                      }
                    });
  expect_late_error("rank 1 is at plan while the others are at dispatch",
                    [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                      if (is_wrong) {
                        static_cast<void>(rank.plan());
                      } else {
                        rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view});
                      }
                    });
}

// The ranks that made the call correctly queue more calls before they learn of the error.
TEST_F(CudaRunAhead, CallsQueuedBehindARefusedOneDoNothing) {
  run_ahead_on_gpu(case_of({40, 25, 9}, 10), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    expect_steps_work(rank, wanted);
    std::vector<std::unique_ptr<QueuedStep>> steps;
    const std::string message = late_message(rank, [&] {
      const Plan plan = rank.plan();
      TensorView x = rank.tensors.x.view;
      if (rank.group.rank() == 1) x.shape = {1, kWidth};
      rank.dispatcher.dispatch(plan, {.x = x});
      for (int step = 0; step < 5; ++step) {
        steps.push_back(std::make_unique<QueuedStep>(rank.dispatcher, rank.tensors));
      }
    });
    EXPECT_THAT(message, HasSubstr("rank 1: x must be [25, 24]"));
    for (const auto& step : steps) {
      for (const std::byte one : to_host(step->out.view, rank.stream)) ASSERT_EQ(one, std::byte{0});
    }
    steps.clear();
    expect_steps_work(rank, wanted);
  });
}

void expect_bad_routing(const std::string& text, int64_t expert_id) {
  run_ahead_on_gpu(case_of({40, 25, 9}, 11), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    expect_steps_work(rank, wanted);
    const OwnedTensor ids = to_device(rank.tensors.expert_ids.view, rank.stream);
    const auto bad = static_cast<int32_t>(expert_id);
    if (rank.group.rank() == 1) {
      cuda_ok(cudaMemcpyAsync(ids.view.data, &bad, sizeof bad, cudaMemcpyHostToDevice,
                              rank.stream.get()));
    }
    Routing routing = rank.tensors.routing();
    routing.expert_ids = ids.view;
    routing.mask = {};
    const std::string message = late_message(rank, [&] {
      const Plan plan = rank.dispatcher.plan(routing);
      rank.dispatcher.dispatch(plan, {.x = rank.tensors.x.view});
    });
    EXPECT_THAT(message, HasSubstr(text));
    expect_steps_work(rank, wanted);
  });
}

TEST_F(CudaRunAhead, ABadRoutingIsNamedOnAllRanks) {
  expect_bad_routing("rank 1: token 0, slot 0: expert id 11 must be in [0, 11)", 11);
}

TEST_F(CudaRunAhead, TooManyRowsAreNamedOnAllRanks) {
  DispatchCase the_case = case_of({40, 25, 9}, 12);
  the_case.config.max_rows = 150;
  run_ahead_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    expect_steps_work(rank, wanted);
    const Shape shape{60, 3};
    OwnedTensor ids = device_tensor(DType::kI32, shape, rank.stream);
    std::vector<int32_t> values;
    for (int i = 0; i < 180; ++i) values.push_back(i % 3);  // experts of rank 0
    cuda_ok(cudaMemcpyAsync(ids.view.data, values.data(), values.size() * sizeof(int32_t),
                            cudaMemcpyHostToDevice, rank.stream.get()));
    const OwnedTensor weights = device_tensor(DType::kF32, shape, rank.stream);
    cuda_ok(cudaMemsetAsync(weights.view.data, 0, static_cast<size_t>(weights.view.num_bytes()),
                            rank.stream.get()));
    const std::string message = late_message(rank, [&] {
      static_cast<void>(rank.dispatcher.plan({.expert_ids = ids.view, .weights = weights.view}));
    });
    EXPECT_THAT(message, HasSubstr("rank 0 would receive 540 rows, more than max_rows (150)"));
    expect_steps_work(rank, wanted);
  });
}

// The hosts meet to connect the lane of begun calls, and find the fault.
TEST_F(CudaRunAhead, AFaultIsFoundByTheFirstBegunCall) {
  run_ahead_on_gpu(case_of({40, 25, 9}, 13), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    expect_steps_work(rank, wanted);
    const Plan plan = rank.plan();
    TensorView x = rank.tensors.x.view;
    const std::string message = message_of([&] {
      if (rank.group.rank() == 1) x.shape = {1, kWidth};
      rank.dispatcher.dispatch(plan, {.x = x});
      x = rank.tensors.x.view;
      static_cast<void>(rank.dispatcher.begin_dispatch(plan, {.x = x}));
    });
    EXPECT_THAT(message, HasSubstr("rank 1: x must be [25, 24]"));
    expect_steps_work(rank, wanted);
    const DispatchResult moved =
        rank.dispatcher.finish(rank.dispatcher.begin_dispatch(plan, {.x = rank.tensors.x.view}));
    EXPECT_EQ(to_host(moved.rows.view, plan.num_rows(), rank.stream), wanted.rows);
  });
}

// A begun call is pending on some ranks when another lane is halted.
TEST_F(CudaRunAhead, APendingBegunCallDoesNotKeepTheRanksFromMeeting) {
  run_ahead_on_gpu(case_of({40, 25, 9}, 14), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const DispatchArgs args{.x = rank.tensors.x.view};
    rank.dispatcher.finish(rank.dispatcher.begin_dispatch(rank.plan(), args));
    rank.stream.synchronize();
    std::optional<Pending<DispatchResult>> pending;
    const std::string message = late_message(rank, [&] {
      const Plan plan = rank.plan();
      TensorView x = rank.tensors.x.view;
      if (rank.group.rank() == 1) x.shape = {1, kWidth};
      rank.dispatcher.dispatch(plan, {.x = x});
      pending = rank.dispatcher.begin_dispatch(plan, args);  // never by rank 1
    });
    EXPECT_THAT(message, HasSubstr("rank 1: x must be [25, 24]"));
    pending.reset();
    expect_steps_work(rank, wanted);
  });
}

// The first begun call connects its own lane; one rank refuses the call before that.
TEST_F(CudaRunAhead, TheFirstBegunCallMayBeRefused) {
  expect_late_error("rank 1: begin_dispatch on a GPU does not call on_chunk",
                    [](GpuRank& rank, const Plan& plan, bool is_wrong) {
                      DispatchArgs args{.x = rank.tensors.x.view};
                      if (is_wrong) args.on_chunk = [](const auto&, const auto&) {};
                      rank.dispatcher.finish(rank.dispatcher.begin_dispatch(plan, args));
                    });
}

// Rank 1 stops at a call while the others are already meeting in a call of another kind.
TEST_F(CudaRunAhead, ARefusalEndsAMeetingOfTheOthers) {
  run_ahead_on_gpu(case_of({40, 25, 9}, 18), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    Dispatcher second(rank.group, rank.dispatcher.config(), "direct");
    second.set_device_options({.stream = rank.stream.view()});
    const auto expect_both_work = [&] {
      expect_steps_work(rank, wanted);
      const QueuedStep step(second, rank.tensors);
      expect_same(step.wait(rank.stream), wanted);
    };
    expect_both_work();
    const Plan plan = rank.plan();
    TensorView x = rank.tensors.x.view;
    if (rank.group.rank() == 1) x.shape = {1, kWidth};
    std::string meeting = "none";
    const std::string message = late_message(rank, [&] {
      rank.dispatcher.dispatch(plan, {.x = x});
      meeting = message_of([&] { rank.group.agree({.operation = "other"}); });
    });
    EXPECT_THAT(message, HasSubstr("rank 1: x must be [25, 24]"));
    if (rank.group.rank() != 1) {
      EXPECT_THAT(meeting, HasSubstr("has stopped, because the ranks"));
    }
    expect_both_work();
  });
}

// The others are already meeting in a call of a dispatcher that never runs ahead.
TEST_F(CudaRunAhead, ARefusalIsTheSameErrorFromADispatcherThatDoesNotRunAhead) {
  run_on_gpu(case_of({40, 25, 9}, 20), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    DispatchConfig config = rank.dispatcher.config();
    config.max_rows.reset();
    Dispatcher meets(rank.group, config, "direct");
    meets.set_device_options({.stream = rank.stream.view()});
    const auto expect_both_work = [&] {
      expect_steps_work(rank, wanted);
      const QueuedStep step(meets, rank.tensors);
      expect_same(step.wait(rank.stream), wanted);
    };
    expect_both_work();
    const Plan plan = rank.plan();
    const Plan other_plan = meets.plan(rank.tensors.routing());
    TensorView x = rank.tensors.x.view;
    if (rank.group.rank() == 1) x.shape = {1, kWidth};
    bool has_met = false;
    const std::string message = message_of([&] {
      rank.dispatcher.dispatch(plan, {.x = x});
      has_met = true;
      static_cast<void>(meets.dispatch(other_plan, {.x = rank.tensors.x.view}));
    });
    EXPECT_THAT(message, HasSubstr("rank 1: x must be [25, 24]"));
    EXPECT_FALSE(has_met && rank.group.rank() == 1);  // the others may find out in either call
    expect_both_work();
  });
}

// The others replay a graph of another dispatcher, which would wait for rank 1.
TEST_F(CudaRunAhead, ARefusalEndsTheReplayOfAnotherDispatchersGraph) {
  run_ahead_on_gpu(case_of({40, 25, 9}, 19), {}, [&](GpuRank& rank, const StepBytes& wanted) {
    Dispatcher second(rank.group, rank.dispatcher.config(), "direct");
    second.set_device_options({.stream = rank.stream.view()});
    expect_steps_work(rank, wanted);
    { const QueuedStep connects(second, rank.tensors); }
    rank.stream.synchronize();
    std::optional<QueuedStep> captured;
    const CapturedGraph graph(rank, [&] { captured.emplace(second, rank.tensors); });
    const Plan plan = rank.plan();
    TensorView x = rank.tensors.x.view;
    if (rank.group.rank() == 1) x.shape = {1, kWidth};
    const std::string message = late_message(rank, [&] {
      rank.dispatcher.dispatch(plan, {.x = x});
      graph.launch();
    });
    EXPECT_THAT(message, HasSubstr("rank 1: x must be [25, 24]"));
    for (int replay = 0; replay < 2; ++replay) {
      graph.launch();
      expect_same(captured->wait(rank.stream), wanted);
    }
    expect_steps_work(rank, wanted);
  });
}

}  // namespace
}  // namespace crossdock
