// A step captured once and replayed with other routings.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "dispatch/cuda/captured_graph.hpp"
#include "dispatch/cuda/step.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaGraph = CudaTest;

void copy_into(const OwnedTensor& to, const ConstTensorView& host, const RankStream& stream) {
  cuda_ok(cudaMemcpyAsync(to.view.data, host.data, static_cast<size_t>(host.num_bytes()),
                          cudaMemcpyHostToDevice, stream.get()));
}

/// Copies another input into the same memory.
void copy_into(const DeviceTensors& to, const RankTensors& host, const RankStream& stream) {
  copy_into(to.x, host.x.view, stream);
  copy_into(to.grad_out, host.grad_out.view, stream);
  copy_into(to.expert_ids, host.expert_ids.view, stream);
  copy_into(to.weights, host.weights.view, stream);
  copy_into(to.mask, host.mask.view, stream);
}

// The same tokens per rank, other routes: random ones, none on rank 1, all to one expert.
std::vector<DispatchCase> routings(const DispatchConfig& config, const std::vector<int64_t>& T) {
  std::vector<DispatchCase> cases;
  for (unsigned seed = 0; seed < 4; ++seed) cases.push_back(random_case(config, T, 20 + seed));
  std::fill(cases[1].ranks[1].expert_ids.begin(), cases[1].ranks[1].expert_ids.end(), -1);
  for (reference::RankInput& rank : cases[2].ranks) {
    for (size_t i = 0; i < rank.expert_ids.size(); ++i) {
      rank.expert_ids[i] = i % static_cast<size_t>(config.top_k) == 0 ? 2 : -1;
    }
  }
  for (reference::RankInput& rank : cases[3].ranks) {
    std::fill(rank.mask.begin(), rank.mask.end(), uint8_t{1});
  }
  return cases;
}

// Captures a Step and replays it with every routing, twice; `expect` compares its results.
template <typename Step, typename Expect>
void replay(const std::vector<DispatchCase>& cases, const GpuSetting& setting,
            const Expect& expect) {
  run_on_gpu(cases[0], setting, [&](GpuRank& rank, const StepBytes& /*of the first*/) {
    std::vector<StepBytes> wanted;
    wanted.reserve(cases.size());
    for (const DispatchCase& one : cases) {
      wanted.push_back(cpu_step(rank.group, one, setting.dtype));
    }
    { const Step warm(rank.dispatcher, rank.tensors); }
    std::optional<Step> queued;
    const CapturedGraph graph(rank, [&] { queued.emplace(rank.dispatcher, rank.tensors); });
    const auto r = static_cast<size_t>(rank.group.rank());
    for (size_t i = 0; i < 2 * cases.size(); ++i) {
      const size_t which = i % cases.size();
      SCOPED_TRACE(which);
      const RankTensors host =
          tensors_of(cases[which].config, cases[which].ranks[r], setting.dtype);
      copy_into(rank.tensors, host, rank.stream);
      graph.launch();
      expect(*queued, rank.stream, wanted[which]);
    }
    rank.dispatcher.check();
  });
}

TEST_F(CudaGraph, ReplayedWithOtherRoutingsGivesTheBitsOfTheCpu) {
  const DispatchConfig config{
      .num_experts = 9, .top_k = 2, .width = 72, .alignment = 8, .max_rows = 400};
  DispatchConfig linked = config;
  linked.copies = Copies::kPerRank;
  linked.partial_sums = PartialSums::kRowType;
  const std::vector<DispatchCase> cases = routings(config, {30, 50, 0, 41});
  replay<QueuedStep>(routings(linked, {30, 50, 0, 41}), {.dtype = DType::kBF16},
                     [](const QueuedStep& queued, const RankStream& stream,
                        const StepBytes& wanted) { expect_same(queued.wait(stream), wanted); });
  for (const int max_sms : {0, 20}) {  // 20: kernels wait for their peers themselves
    replay<QueuedStep>(cases, {.dtype = DType::kBF16, .options = {.max_sms = max_sms}},
                       [](const QueuedStep& queued, const RankStream& stream,
                          const StepBytes& wanted) { expect_same(queued.wait(stream), wanted); });
  }
}

// A dispatch and a combine of one plan, each begun before another call and finished after it.
struct BegunStep {
  Plan plan;
  DispatchResult begun;
  DispatchResult beside;
  OwnedTensor out;
  OwnedTensor grad_x;

  BegunStep(Dispatcher& dispatcher, const DeviceTensors& tensors)
      : plan(dispatcher.plan(tensors.routing())) {
    Pending<DispatchResult> dispatched = dispatcher.begin_dispatch(plan, {.x = tensors.x.view});
    beside = dispatcher.dispatch(plan, {.x = tensors.x.view});
    begun = dispatcher.finish(std::move(dispatched));
    Pending<OwnedTensor> combined = dispatcher.begin_combine(plan, begun.rows.view);
    grad_x = dispatcher.dispatch_backward(plan, beside.rows.view);
    out = dispatcher.finish(std::move(combined));
  }
};

TEST_F(CudaGraph, WithCallsThatBeginBesideOthersGivesTheBitsOfTheCpu) {
  const DispatchConfig config{.num_experts = 9, .top_k = 2, .width = 72, .max_rows = 400};
  replay<BegunStep>(routings(config, {30, 50}), {.dtype = DType::kBF16},
                    [](const BegunStep& queued, const RankStream& stream, const StepBytes& wanted) {
                      stream.synchronize();
                      const int64_t R = queued.plan.num_rows();
                      EXPECT_EQ(to_host(queued.begun.rows.view, R, stream), wanted.rows);
                      EXPECT_EQ(to_host(queued.beside.rows.view, R, stream), wanted.rows);
                      EXPECT_EQ(to_host(queued.out.view, stream), wanted.out);
                      EXPECT_EQ(to_host(queued.grad_x.view, stream), wanted.grad_x);
                    });
}

TEST_F(CudaGraph, ARefusedRoutingIsZerosAndAnErrorAtTheNextCheck) {
  const DispatchConfig config{.num_experts = 6, .top_k = 2, .width = 16, .max_rows = 100};
  const DispatchCase the_case = random_case(config, {12, 12}, 30);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    const auto r = static_cast<size_t>(rank.group.rank());
    const RankTensors host = tensors_of(config, the_case.ranks[r], DType::kF32);
    { const QueuedStep warm(rank.dispatcher, rank.tensors); }
    std::optional<QueuedStep> queued;
    const CapturedGraph graph(rank, [&] { queued.emplace(rank.dispatcher, rank.tensors); });
    const int32_t bad_id = 77;
    if (rank.group.rank() == 1) {
      cuda_ok(cudaMemcpyAsync(static_cast<int32_t*>(rank.tensors.expert_ids.view.data) + 5, &bad_id,
                              sizeof(bad_id), cudaMemcpyHostToDevice, rank.stream.get()));
    }
    graph.launch();
    const StepBytes refused = queued->wait(rank.stream);
    EXPECT_EQ(refused.out, std::vector<std::byte>(refused.out.size()));
    EXPECT_TRUE(refused.rows.empty());
    const std::optional<Error> error = error_of([&] { rank.dispatcher.check(); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(std::string(error->what()),
              "rank 1: token 2, slot 1: expert id 77 must be in [0, 6), or -1 for no route");
    copy_into(rank.tensors.expert_ids, host.expert_ids.view, rank.stream);
    graph.launch();
    EXPECT_EQ(queued->wait(rank.stream).out, wanted.out);
    rank.dispatcher.check();
  });
}

TEST_F(CudaGraph, TheNumberOfRowsIsNotToldDuringTheCapture) {
  const DispatchCase the_case =
      random_case({.num_experts = 6, .top_k = 2, .width = 16, .max_rows = 100}, {12, 12}, 32);
  run_on_gpu(the_case, {}, [&](GpuRank& rank, const StepBytes& wanted) {
    { const QueuedStep warm(rank.dispatcher, rank.tensors); }
    std::optional<QueuedStep> queued;
    const CapturedGraph graph(rank, [&] {
      queued.emplace(rank.dispatcher, rank.tensors);
      EXPECT_EQ(queued->plan.capacity_rows(), 100);
      EXPECT_THAT(message_of([&] { queued->plan.num_rows(); }), HasSubstr("capacity_rows"));
    });
    graph.launch();
    expect_same(queued->wait(rank.stream), wanted);
  });
}

TEST_F(CudaGraph, APlanThatMakesTheHostWaitIsRefused) {
  const DispatchCase the_case =
      random_case({.num_experts = 6, .top_k = 2, .width = 16}, {12, 12}, 31);
  const std::pair<const char*, const char*> expected[] = {{"direct", "needs max_rows"},
                                                          {"alltoall", "made on the host"}};
  for (const auto& expectation : expected) {
    const GpuSetting setting{.strategy = expectation.first};
    run_on_gpu(the_case, setting, [&](GpuRank& rank, const StepBytes& wanted) {
      { const QueuedStep warm(rank.dispatcher, rank.tensors); }
      rank.stream.synchronize();
      cuda_ok(cudaStreamBeginCapture(rank.stream.get(), cudaStreamCaptureModeThreadLocal));
      EXPECT_THAT(message_of([&] { rank.plan(); }), HasSubstr(expectation.second));
      cudaGraph_t nothing = nullptr;
      cuda_ok(cudaStreamEndCapture(rank.stream.get(), &nothing));
      cuda_ok(cudaGraphDestroy(nothing));
      const QueuedStep next(rank.dispatcher, rank.tensors);
      EXPECT_EQ(next.wait(rank.stream).out, wanted.out);
    });
  }
}

}  // namespace
}  // namespace crossdock
