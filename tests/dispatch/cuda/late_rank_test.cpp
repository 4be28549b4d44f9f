// A rank whose GPU is late: the others report it, use none of its memory, and their results are
// zero. Rank 1 is late: its stream is blocked by a gate that rank 0 opens.

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/gate.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using CudaLateRank = CudaTest;

constexpr int kFiller = 0xff;
constexpr int64_t kWidth = 16;

DispatchCase late_case() {
  return random_case({.num_experts = 6, .top_k = 2, .width = kWidth, .max_rows = 100}, {9, 7}, 43);
}

/// The same with one copy per rank and partial sums.
DispatchCase linked_case() {
  DispatchCase result = late_case();
  result.config.copies = Copies::kPerRank;
  result.config.partial_sums = PartialSums::kF32;
  return result;
}

ThreadOptions deadline_of_two_seconds() {
  ThreadOptions options = short_deadlines();
  options.group.arrival_deadline = std::chrono::seconds(2);
  return options;
}

void fill(const TensorView& tensor, const RankStream& stream) {
  cuda_ok(
      cudaMemsetAsync(tensor.data, kFiller, static_cast<size_t>(tensor.num_bytes()), stream.get()));
}

bool holds_only(int value, const ConstTensorView& tensor, const RankStream& stream) {
  const std::vector<std::byte> bytes = to_host(tensor, stream);
  return bytes == std::vector<std::byte>(bytes.size(), static_cast<std::byte>(value));
}

/// Checks rows of rank 0 after a dispatch without rank 1. `wanted`: the complete rows; the first
/// column tells the source (see random_case).
void expect_own_rows_zero(const TensorView& rows, const std::vector<std::byte>& wanted,
                          const RankStream& stream) {
  const std::vector<std::byte> bytes = to_host(rows, stream);
  const auto row_bytes = static_cast<size_t>(rows.row_bytes());
  for (size_t begin = 0; begin < wanted.size(); begin += row_bytes) {
    float first = 0;
    std::memcpy(&first, wanted.data() + begin, sizeof(first));
    if (first >= 16) continue;  // owed by rank 1
    for (size_t i = begin; i < begin + row_bytes; ++i) {
      ASSERT_EQ(bytes[i], std::byte{0}) << "row " << begin / row_bytes << ", byte " << i - begin;
    }
  }
}

void expect_failure(GpuRank& rank, ErrorCode code, const std::string& operation) {
  const std::optional<Error> error = error_of([&] { rank.dispatcher.check(); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), code) << error->what();
  EXPECT_EQ(error->context().culprit, 1 - rank.group.rank()) << error->what();
  EXPECT_EQ(error->context().operation, operation) << error->what();
  EXPECT_TRUE(rank.group.is_poisoned());
}

/// All calls of a plan that was made before, queued on one rank.
struct AllCalls {
  DispatchResult moved;
  OwnedTensor out;
  OwnedTensor grad_x;
  CombineBackwardResult backward;
  OwnedTensor routes;

  AllCalls(GpuRank& rank, const Plan& plan, const TensorView& rows)
      : moved(rank.dispatcher.dispatch(
            plan, {.x = rank.tensors.x.view, .rows = rows, .with_row_weights = true})),
        out(rank.dispatcher.combine(plan, rows)),
        grad_x(rank.dispatcher.dispatch_backward(plan, rows)),
        backward(rank.dispatcher.combine_backward(plan, rank.tensors.grad_out.view, rows)),
        routes(rank.dispatcher.collect_routes(plan, moved.row_weights.view)) {}

  std::vector<TensorView> own_outputs() const {
    return {out.view, grad_x.view, backward.grad_weights.view, routes.view};
  }
  /// The tensors that peers write to.
  std::array<TensorView, 3> landings() const {
    return {moved.rows.view, moved.row_weights.view, backward.grad_rows.view};
  }
};

// All calls are in a graph, so their results exist and are filled before any of them fails.
void expect_untouched_peers(const GpuSetting& setting, const DispatchCase& the_case = late_case()) {
  Gate late;
  std::array<TensorView, 3> of_late_rank;
  run_ranks(
      2,
      [&](Group& group) {
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        GpuRank rank(group, the_case, setting);
        const Plan plan = rank.plan();
        const OwnedTensor rows =
            device_tensor(DType::kF32, {plan.capacity_rows(), kWidth}, rank.stream);
        { const AllCalls warm(rank, plan, rows.view); }
        std::optional<AllCalls> calls;
        const CapturedGraph graph(rank, [&] { calls.emplace(rank, plan, rows.view); });
        for (const TensorView& tensor : calls->own_outputs()) fill(tensor, rank.stream);
        for (const TensorView& tensor : calls->landings()) fill(tensor, rank.stream);
        rank.stream.synchronize();
        if (group.rank() == 1) of_late_rank = calls->landings();
        group.agree({.operation = "filled"});
        if (group.rank() == 1) {
          late.hold(rank.stream.get());
          graph.launch();
          rank.stream.synchronize();
          expect_failure(rank, ErrorCode::kPeerFailed, "dispatch");
        } else {
          const GateOpener opener(late);
          graph.launch();
          rank.stream.synchronize();
          expect_failure(rank, ErrorCode::kTimeout, "dispatch");
          for (const TensorView& tensor : of_late_rank) {
            EXPECT_TRUE(holds_only(kFiller, tensor, rank.stream));
          }
          expect_own_rows_zero(rows.view, wanted.rows, rank.stream);
        }
        for (const TensorView& tensor : calls->own_outputs()) {
          EXPECT_TRUE(holds_only(0, tensor, rank.stream));
        }
      },
      deadline_of_two_seconds());
}

// New ranks work: the CUDA context is still usable.
void expect_new_ranks_work() {
  run_on_gpu(late_case(), {}, [](GpuRank& rank, const StepBytes& wanted) {
    const QueuedStep step(rank.dispatcher, rank.tensors);
    EXPECT_EQ(step.wait(rank.stream).out, wanted.out);
  });
}

TEST_F(CudaLateRank, HasNoneOfItsMemoryUsedByCallsThatWaitedForIt) {
  for (const int max_sms : {0, 20}) {  // 20: kernels wait for their peers themselves
    SCOPED_TRACE(max_sms);
    expect_untouched_peers({.options = {.max_sms = max_sms}});
  }
  expect_untouched_peers({.strategy = "alltoall"});
  expect_untouched_peers({}, linked_case());
  expect_new_ranks_work();
}

/// One call that rank 1 is late for.
struct LateCall {
  std::string operation;
  GpuSetting setting{};
  bool is_begun = false;
  int64_t num_chunks = 1;
  PartialSums sums = PartialSums::kNone;
  int ranks_per_node = 0;  // 0: all on one node
  Copies copies = Copies::kAuto;
};

// Into memory of the caller: rows [R, D] of a dispatch, out [T, D] of the others.
void queue(GpuRank& rank, const LateCall& call, const Plan& plan, const TensorView& rows,
           const TensorView& out) {
  Dispatcher& dispatcher = rank.dispatcher;
  const DispatchArgs args{.x = rank.tensors.x.view, .rows = rows, .num_chunks = call.num_chunks};
  if (call.operation == "dispatch" && call.is_begun) {
    dispatcher.finish(dispatcher.begin_dispatch(plan, args));
  } else if (call.operation == "dispatch") {
    dispatcher.dispatch(plan, args);
  } else if (call.operation == "combine" && call.is_begun) {
    dispatcher.finish(dispatcher.begin_combine(plan, rows, out));
  } else if (call.operation == "combine") {
    dispatcher.combine(plan, rows, out);
  } else {
    dispatcher.dispatch_backward(plan, rows, out);
  }
}

void expect_late_rank_is_named(const LateCall& call) {
  DispatchCase the_case = late_case();
  the_case.config.partial_sums = call.sums;
  the_case.config.copies = call.copies;
  ThreadOptions options = deadline_of_two_seconds();
  options.ranks_per_node = call.ranks_per_node;
  Gate late;
  TensorView rows_of_late_rank;
  run_ranks(
      2,
      [&](Group& group) {
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        GpuRank rank(group, the_case, call.setting);
        const Plan plan = rank.plan();
        const Shape shape{plan.capacity_rows(), kWidth};
        const OwnedTensor rows = device_tensor(DType::kF32, shape, rank.stream);
        const OwnedTensor out =
            device_tensor(DType::kF32, {plan.num_tokens(), kWidth}, rank.stream);
        queue(rank, call, plan, rows.view, out.view);  // sets up
        fill(rows.view, rank.stream);
        fill(out.view, rank.stream);
        rank.stream.synchronize();
        if (group.rank() == 1) rows_of_late_rank = rows.view;
        group.agree({.operation = "filled"});
        if (group.rank() == 1) {
          late.hold(rank.stream.get());
          queue(rank, call, plan, rows.view, out.view);
          rank.stream.synchronize();
          expect_failure(rank, ErrorCode::kPeerFailed, call.operation);
          return;
        }
        const GateOpener opener(late);
        queue(rank, call, plan, rows.view, out.view);
        rank.stream.synchronize();
        expect_failure(rank, ErrorCode::kTimeout, call.operation);
        EXPECT_TRUE(holds_only(kFiller, rows_of_late_rank, rank.stream));
        if (call.operation == "dispatch") {
          expect_own_rows_zero(rows.view, wanted.rows, rank.stream);
        } else {
          EXPECT_TRUE(holds_only(0, out.view, rank.stream));
        }
      },
      options);
}

TEST_F(CudaLateRank, IsNamedWithTheCallThatWaitedForIt) {
  const GpuSetting on_few_sms{.options = {.max_sms = 20}};
  for (const LateCall& call :
       {LateCall{.operation = "dispatch"}, LateCall{.operation = "dispatch", .setting = on_few_sms},
        LateCall{.operation = "dispatch", .is_begun = true}, LateCall{.operation = "combine"},
        LateCall{.operation = "combine", .setting = on_few_sms},
        LateCall{.operation = "combine", .is_begun = true},
        LateCall{.operation = "combine", .setting = {.strategy = "alltoall"}},
        LateCall{.operation = "dispatch_backward"},
        LateCall{.operation = "dispatch", .copies = Copies::kPerRank}}) {
    SCOPED_TRACE(call.operation);
    expect_late_rank_is_named(call);
    expect_new_ranks_work();
  }
}

TEST_F(CudaLateRank, IsNamedWithADispatchInChunksThatWaitedForIt) {
  for (const int max_begun_sms : {0, 20}) {
    expect_late_rank_is_named({.operation = "dispatch",
                               .setting = {.options = {.max_begun_sms = max_begun_sms}},
                               .is_begun = true,
                               .num_chunks = 3});
    expect_new_ranks_work();
  }
}

// Ranks of one node wait before they sum, ranks of different nodes before they exchange the sums.
TEST_F(CudaLateRank, IsNamedWithThePartialSumsThatWaitedForIt) {
  for (const LateCall& call :
       {LateCall{.operation = "combine"},
        LateCall{.operation = "combine", .setting = {.strategy = "alltoall"}},
        LateCall{.operation = "combine", .setting = {.strategy = "hierarchical"}},
        LateCall{.operation = "dispatch_backward",
        .setting = {.strategy = "hierarchical"},
        .ranks_per_node = 1}}) {
    LateCall with_sums = call;
    with_sums.sums = PartialSums::kF32;
    SCOPED_TRACE(call.setting.strategy + " " + call.operation);
    expect_late_rank_is_named(with_sums);
  }
  expect_new_ranks_work();
}

// A routing is refused in one replay, and rank 1 is late in the next, before any rank has checked.
TEST_F(CudaLateRank, IsReportedAlsoWhereARefusedRoutingWasNotReadYet) {
  const DispatchCase the_case = late_case();
  Gate late;
  run_ranks(
      2,
      [&](Group& group) {
        GpuRank rank(group, the_case, {});
        { const QueuedStep warm(rank.dispatcher, rank.tensors); }
        std::optional<QueuedStep> queued;
        const CapturedGraph graph(rank, [&] { queued.emplace(rank.dispatcher, rank.tensors); });
        const int32_t bad_id = 77;
        if (group.rank() == 1) {
          cuda_ok(cudaMemcpyAsync(rank.tensors.expert_ids.view.data, &bad_id, sizeof(bad_id),
                                  cudaMemcpyHostToDevice, rank.stream.get()));
        }
        graph.launch();
        rank.stream.synchronize();
        group.agree({.operation = "refused"});
        if (group.rank() == 1) {
          late.hold(rank.stream.get());
          graph.launch();
          rank.stream.synchronize();
          expect_failure(rank, ErrorCode::kPeerFailed, "dispatch");
        } else {
          const GateOpener opener(late);
          graph.launch();
          rank.stream.synchronize();
          expect_failure(rank, ErrorCode::kTimeout, "plan");
        }
      },
      deadline_of_two_seconds());
}

// The plan is not in the graph, so a replay of the dispatch alone must wait for rank 1, which has
// not yet read the rows of the previous replay.
TEST_F(CudaLateRank, KeepsItsRowsWhenADispatchIsReplayedWithoutItsPlan) {
  const DispatchCase the_case = late_case();
  Gate late;
  Gate launched;
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const RankStream reader;
    const DispatchArgs args{.x = rank.tensors.x.view};
    rank.dispatcher.dispatch(rank.plan(), args);  // the next plan brings rows for such a dispatch
    const Plan plan = rank.plan();
    const int64_t R = plan.num_rows();
    DispatchResult moved;
    const CapturedGraph graph(rank, [&] { moved = rank.dispatcher.dispatch(plan, args); });
    graph.launch();
    EXPECT_EQ(to_host(moved.rows.view, R, rank.stream), wanted.rows);
    rank.group.agree({.operation = "replayed"});
    if (rank.group.rank() == 0) {
      const GateOpener opener(launched);
      fill(rank.tensors.x.view, rank.stream);
      graph.launch();
    } else {
      const GateOpener opener(late);
      late.hold(rank.stream.get());
      graph.launch();
      EXPECT_TRUE(launched.wait());
      for (int i = 0; i < 20; ++i) {
        ASSERT_EQ(to_host(moved.rows.view, R, reader), wanted.rows);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
    rank.stream.synchronize();
    EXPECT_NE(to_host(moved.rows.view, R, rank.stream), wanted.rows);
    rank.dispatcher.check();
  });
}

}  // namespace
}  // namespace crossdock
