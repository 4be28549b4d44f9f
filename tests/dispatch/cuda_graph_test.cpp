// A step captured once and replayed with other routings.

#include <gtest/gtest.h>

#include "crossdock/cuda.hpp"
#include "dispatch/cuda_step.hpp"

namespace crossdock {
namespace {

class CudaGraph : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_missing_reason();
  }
};

class CapturedGraph {
 public:
  template <typename Body>
  CapturedGraph(const RankStream& stream, const Body& body) {
    cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
    body();
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(stream.get(), &graph));
    cuda_ok(cudaGraphInstantiate(&executable_, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
  }
  ~CapturedGraph() { cudaGraphExecDestroy(executable_); }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void launch(const RankStream& stream) const {
    cuda_ok(cudaGraphLaunch(executable_, stream.get()));
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

void copy_into(const OwnedTensor& to, const ConstTensorView& host, const RankStream& stream) {
  cuda_ok(cudaMemcpyAsync(to.view.data, host.data, static_cast<size_t>(host.num_bytes()),
                          cudaMemcpyHostToDevice, stream.get()));
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

TEST_F(CudaGraph, ReplayedWithOtherRoutingsGivesTheBitsOfTheCpu) {
  const DispatchConfig config{
      .num_experts = 9, .top_k = 2, .width = 72, .alignment = 8, .max_rows = 400};
  const std::vector<DispatchCase> cases = routings(config, {30, 50, 0, 41});
  run_ranks(
      4,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        std::vector<StepBytes> wanted;
        for (const DispatchCase& one : cases) {
          wanted.push_back(cpu_step(group, one, DType::kBF16));
        }
        const RankStream stream;
        const DeviceTensors tensors(tensors_of(config, cases[0].ranks[r], DType::kBF16), stream);
        Dispatcher dispatcher(group, config, "direct");
        dispatcher.set_device_options({.stream = stream.view()});
        { const QueuedStep warm(dispatcher, tensors); }
        std::optional<QueuedStep> queued;
        const CapturedGraph graph(stream, [&] { queued.emplace(dispatcher, tensors); });
        for (size_t i = 0; i < 2 * cases.size(); ++i) {
          const size_t which = i % cases.size();
          const RankTensors host = tensors_of(config, cases[which].ranks[r], DType::kBF16);
          copy_into(tensors.x, host.x.view, stream);
          copy_into(tensors.grad_out, host.grad_out.view, stream);
          copy_into(tensors.expert_ids, host.expert_ids.view, stream);
          copy_into(tensors.weights, host.weights.view, stream);
          copy_into(tensors.mask, host.mask.view, stream);
          graph.launch(stream);
          const StepBytes got = queued->wait(stream);
          EXPECT_EQ(got.rows, wanted[which].rows) << which;
          EXPECT_EQ(got.row_weights, wanted[which].row_weights) << which;
          EXPECT_EQ(got.out, wanted[which].out) << which;
          EXPECT_EQ(got.grad_x, wanted[which].grad_x) << which;
          EXPECT_EQ(got.grad_rows, wanted[which].grad_rows) << which;
          EXPECT_EQ(got.grad_weights, wanted[which].grad_weights) << which;
        }
        dispatcher.check();
      },
      short_deadlines());
}

TEST_F(CudaGraph, ARefusedRoutingIsZerosAndAnErrorAtTheNextCheck) {
  const DispatchConfig config{.num_experts = 6, .top_k = 2, .width = 16, .max_rows = 100};
  const DispatchCase the_case = random_case(config, {12, 12}, 30);
  run_ranks(
      2,
      [&](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const StepBytes wanted = cpu_step(group, the_case, DType::kF32);
        const RankStream stream;
        const RankTensors host = tensors_of(config, the_case.ranks[r], DType::kF32);
        const DeviceTensors tensors(host, stream);
        Dispatcher dispatcher(group, config, "direct");
        dispatcher.set_device_options({.stream = stream.view()});
        { const QueuedStep warm(dispatcher, tensors); }
        std::optional<QueuedStep> queued;
        const CapturedGraph graph(stream, [&] { queued.emplace(dispatcher, tensors); });
        const int32_t bad_id = 77;
        if (group.rank() == 1) {
          cuda_ok(cudaMemcpyAsync(static_cast<int32_t*>(tensors.expert_ids.view.data) + 5, &bad_id,
                                  sizeof(bad_id), cudaMemcpyHostToDevice, stream.get()));
        }
        graph.launch(stream);
        const StepBytes refused = queued->wait(stream);
        EXPECT_EQ(refused.out, std::vector<std::byte>(refused.out.size()));
        EXPECT_TRUE(refused.rows.empty());
        try {
          dispatcher.check();
          ADD_FAILURE() << "no error came";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
          EXPECT_EQ(std::string(error.what()),
                    "rank 1: token 2, slot 1: expert id 77 must be in [0, 6), or -1 for no route");
        }
        copy_into(tensors.expert_ids, host.expert_ids.view, stream);
        graph.launch(stream);
        EXPECT_EQ(queued->wait(stream).out, wanted.out);
        dispatcher.check();
      },
      short_deadlines());
}

}  // namespace
}  // namespace crossdock
