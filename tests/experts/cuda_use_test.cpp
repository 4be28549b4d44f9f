// How experts on a GPU are called: in parts, in streams, in graphs, with other output types.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "experts/device_tensors.hpp"

namespace crossdock {
namespace {

class CudaExpertsUse : public CudaTest {};

ExpertsConfig gated_config(DType dtype = DType::kBF16) {
  return {.num_local_experts = 6, .width = 64, .inner = 40, .dtype = dtype};
}

ExpertsConfig plain_config() {
  ExpertsConfig config = gated_config();
  config.activation = Activation::kSquaredRelu;
  config.weights_in = WeightsIn::kExperts;
  config.recompute = true;
  return config;
}

constexpr int64_t kRows = 460;

std::vector<ExpertCase> cases_of(const ExpertsConfig& config) {
  std::vector<ExpertCase> cases;
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{30, 0, 257, 44, 0, 83},
                                             {0, 0, 0, 0, 0, 0},
                                             {0, 460, 0, 0, 0, 0},
                                             {1, 0, 0, 0, 0, 0},
                                             {5, 17, 2, 200, 64, 1}}) {
    cases.push_back(case_of(config, counts, kRows));
  }
  return cases;
}

// free_sms: SMs that products leave to other streams; more than the GPU has leaves one to them.
void expect_bits_in_parts(const ExpertCase& test, const ExpertResult& wanted, int free_sms) {
  const RankStream stream;
  const ExpertTensors tensors = to_device(ExpertTensors(test, kNaN), stream);
  const Experts experts(test.config);
  ExpertsForwardArgs forward = tensors.forward_args();
  forward.free_sms = free_sms;
  ExpertsSaved saved = experts.begin_forward(forward);
  for (const SegmentRange part : {SegmentRange{3, 6}, {0, 1}, {1, 1}, {1, 3}}) {
    experts.forward_part(forward, saved, part);
  }
  ExpertsBackwardDxArgs dx = tensors.dx_args(saved);
  dx.free_sms = free_sms;
  experts.begin_backward_dx(dx);
  for (const SegmentRange part : {SegmentRange{2, 6}, {0, 2}}) {
    experts.backward_dx_part(dx, part);
  }
  experts.finish_backward_dx(dx);
  experts.backward_dw(tensors.dw_args(saved));
  EXPECT_TRUE(result_of(tensors, stream) == wanted) << free_sms << " free SMs";
}

TEST_F(CudaExpertsUse, InPartsAndOnSomeSmsGivesTheBitsOfTheWhole) {
  const ExpertsConfig wide = gated_config(DType::kF32);  // computed by the plain kernels
  for (const ExpertsConfig& config : {gated_config(), plain_config(), wide}) {
    const ExpertCase test = cases_of(config)[0];
    const ExpertResult wanted = run_on_gpu(test);
    for (const int free_sms : {0, 1, 100, 100000}) expect_bits_in_parts(test, wanted, free_sms);
  }
}

TEST_F(CudaExpertsUse, RefusesANegativeNumberOfFreeSms) {
  const ExpertCase test = cases_of(gated_config())[0];
  const RankStream stream;
  const ExpertTensors tensors = to_device(ExpertTensors(test, kNaN), stream);
  ExpertsForwardArgs forward = tensors.forward_args();
  forward.free_sms = -1;
  EXPECT_THROW((void)Experts(test.config).forward(forward), Error);
}

TEST_F(CudaExpertsUse, ACapturedStepIsReplayedWithOtherSegments) {
  for (const ExpertsConfig& config : {gated_config(), plain_config()}) {
    const std::vector<ExpertCase> cases = cases_of(config);
    std::vector<ExpertResult> wanted;
    wanted.reserve(cases.size());
    for (const ExpertCase& one : cases) wanted.push_back(run_on_gpu(one));
    const RankStream stream;
    ExpertTensors tensors = to_device(ExpertTensors(cases[0], kNaN), stream);
    const Experts experts(config);
    ExpertsSaved saved;
    const QueuedGraph graph(stream, [&] {  // the first calls of these experts
      saved = experts.forward(tensors.forward_args());
      experts.backward_dx(tensors.dx_args(saved));
      experts.backward_dw(tensors.dw_args(saved));
    });
    for (size_t i = 0; i < 3 * cases.size(); ++i) {
      const size_t which = i % cases.size();
      copy_into(tensors, ExpertTensors(cases[which], kNaN), stream);
      graph.launch();
      EXPECT_TRUE(result_of(tensors, stream) == wanted[which]) << "replay " << i;
    }
  }
}

TEST_F(CudaExpertsUse, StepsBesideAGraphDoNotUseItsMemory) {
  const std::vector<ExpertCase> cases = cases_of(gated_config());
  const ExpertResult wanted = run_on_gpu(cases[0]);
  const RankStream stream;
  const RankStream beside;
  const ExpertTensors tensors = to_device(ExpertTensors(cases[0], kNaN), stream);
  const ExpertTensors others = to_device(ExpertTensors(cases[4], kNaN), beside);
  beside.synchronize();
  const Experts experts(gated_config());
  run_step(experts, tensors);
  stream.synchronize();
  ExpertsSaved saved;
  const QueuedGraph graph(stream, [&] {
    saved = experts.forward(tensors.forward_args());
    experts.backward_dx(tensors.dx_args(saved));
    experts.backward_dw(tensors.dw_args(saved));
  });
  for (int i = 0; i < 20; ++i) {
    graph.launch();
    run_step(experts, others);
  }
  EXPECT_TRUE(result_of(tensors, stream) == wanted);
  EXPECT_TRUE(result_of(others, beside) == run_on_gpu(cases[4]));
}

TEST_F(CudaExpertsUse, SeveralForwardsMayBePending) {
  const std::vector<ExpertCase> cases = cases_of(gated_config());
  const RankStream stream;
  const Experts experts(gated_config());
  std::vector<ExpertTensors> tensors;
  std::vector<ExpertsSaved> saved;
  for (const ExpertCase& one : cases) {
    tensors.push_back(to_device(ExpertTensors(one, kNaN), stream));
    saved.push_back(experts.forward(tensors.back().forward_args()));
  }
  for (size_t i = 0; i < cases.size(); ++i) experts.backward_dx(tensors[i].dx_args(saved[i]));
  for (size_t i = cases.size(); i-- > 0;) {
    experts.backward_dw(tensors[i].dw_args(saved[i]));
    saved[i] = {};
    EXPECT_TRUE(result_of(tensors[i], stream) == run_on_gpu(cases[i])) << i;
  }
}

TEST_F(CudaExpertsUse, ThreadsMayShareExpertsEachInItsOwnStream) {
  const std::vector<ExpertCase> cases = cases_of(gated_config());
  const Experts experts(gated_config());
  std::vector<ExpertResult> got(cases.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < cases.size(); ++i) {
    threads.emplace_back([&, i] {
      const RankStream stream;
      ExpertTensors tensors = to_device(ExpertTensors(cases[i], kNaN), stream);
      stream.synchronize();
      if (i % 2 == 1) tensors.stream = {cudaStreamPerThread};
      for (int step = 0; step < 10; ++step) run_step(experts, tensors);
      cuda_ok(cudaStreamSynchronize(cudaStreamPerThread));
      got[i] = result_of(tensors, stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < cases.size(); ++i) EXPECT_TRUE(got[i] == run_on_gpu(cases[i])) << i;
}

TEST_F(CudaExpertsUse, AStepInTheSteadyStateTakesNoNewMemory) {
  const RankStream stream;
  const ExpertCase test = cases_of(gated_config())[0];
  const ExpertTensors tensors = to_device(ExpertTensors(test, kNaN), stream);
  const Experts experts(test.config);
  const auto free_bytes = [&] {
    stream.synchronize();
    size_t free = 0;
    size_t total = 0;
    cuda_ok(cudaMemGetInfo(&free, &total));
    return free;
  };
  for (int i = 0; i < 3; ++i) run_step(experts, tensors);
  // Other processes may take and free memory of the same GPU meanwhile, but hardly every time.
  bool took_none = false;
  for (int attempt = 0; attempt < 50 && !took_none; ++attempt) {
    const size_t before = free_bytes();
    for (int i = 0; i < 200; ++i) run_step(experts, tensors);
    took_none = free_bytes() >= before;
  }
  EXPECT_TRUE(took_none);
}

TEST_F(CudaExpertsUse, ResultsMayBeInFp32AndWeightGradientsInTheDtypeOfTheExperts) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const WeightsIn weights_in : {WeightsIn::kCombine, WeightsIn::kExperts}) {
      ExpertsConfig config = gated_config(dtype);
      config.weights_in = weights_in;
      const ExpertCase test = cases_of(config)[0];
      const ExpertResult wanted = run_on_gpu(test);
      const RankStream stream;
      ExpertTensors tensors = to_device(ExpertTensors(test, kNaN), stream);
      for (OwnedTensor* wide : {&tensors.y, &tensors.grad_rows}) {
        *wide = device_tensor(DType::kF32, wide->view.shape, stream);
      }
      for (OwnedTensor* narrow : {&tensors.grad_w1, &tensors.grad_w2}) {
        *narrow = device_tensor(dtype, narrow->view.shape, stream);
      }
      run_step(Experts(config), tensors);
      expect_close(result_of(tensors, stream), wanted, tolerance(dtype));
    }
  }
}

TEST_F(CudaExpertsUse, SaveHiddenRowsOrNothingAndReplaceThemInBackward) {
  for (const bool recompute : {false, true}) {
    for (const bool keep_for_dw : {false, true}) {
      ExpertsConfig config = gated_config();
      config.recompute = recompute;
      const ExpertCase test = cases_of(config)[0];
      const RankStream stream;
      const ExpertTensors tensors = to_device(ExpertTensors(test, kNaN), stream);
      const Experts experts(config);
      const int64_t hidden_bytes = kRows * config.hidden_width() * 2;
      ExpertsSaved saved = experts.forward(tensors.forward_args());
      EXPECT_EQ(saved.num_bytes(), recompute ? 0 : hidden_bytes);
      ExpertsBackwardDxArgs dx = tensors.dx_args(saved);
      dx.keep_for_dw = keep_for_dw;
      experts.backward_dx(dx);
      EXPECT_EQ(saved.num_bytes(), keep_for_dw ? hidden_bytes + kRows * config.inner * 2 : 0);
    }
  }
}

TEST_F(CudaExpertsUse, RefusesMixedMemory) {
  const ExpertCase test = cases_of(gated_config())[0];
  const RankStream stream;
  const ExpertTensors host(test, kNaN);
  const ExpertTensors device = to_device(host, stream);
  const Experts experts(test.config);
  const auto refusal = [](const std::string& words) {
    return testing::ThrowsMessage<Error>(testing::HasSubstr(words));
  };
  ExpertsForwardArgs args = device.forward_args();
  args.weights.w2 = host.w2.view;
  EXPECT_THAT([&] { experts.forward(args); }, refusal("w2 must be on GPU 0, it is in host memory"));
  args = device.forward_args();
  args.segments = host.segments();
  EXPECT_THAT([&] { experts.forward(args); },
              refusal("the rows are on GPU 0, so segments must be there too, not in host memory"));
  args = host.forward_args();
  args.segments = device.segments();
  EXPECT_THAT([&] { experts.forward(args); },
              refusal("the rows are in host memory, so segments must be there too, not on GPU 0"));
  ExpertsSaved saved = experts.forward(host.forward_args());
  EXPECT_THAT([&] { experts.backward_dx(device.dx_args(saved)); },
              refusal("bytes of hidden rows on GPU 0, got"));
}

}  // namespace
}  // namespace crossdock
