// A router's calls captured in a graph, its values on the device, and its refusals there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "router/cuda/both_devices.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;
using CudaRouterCalls = CudaTest;

constexpr int64_t kTokens = 50;
constexpr int64_t kExperts = 24;

RouterConfig graph_config() {
  RouterConfig config{.num_experts = kExperts,
                      .top_k = 4,
                      .width = 40,
                      .dtype = DType::kBF16,
                      .score = Score::kSigmoid,
                      .jitter = 0.0};
  config.aux_loss_coeffs = {.batch = 0.3, .sequence = 0.7, .global_batch = 0.0};
  config.z_loss_coeff = 0.01;
  return config;
}

reference::RouterInput graph_input(uint64_t seed) {
  auto input = exact_input(graph_config(), kTokens, seed);
  input.num_sequences = 3;
  for (int64_t t = 0; t < kTokens; ++t) {
    input.sequence_ids.push_back(static_cast<int32_t>((t * seed) % 3));
    input.mask.push_back((static_cast<uint64_t>(t) * 7 + seed) % 5 == 0 || seed == 3 ? 1 : 0);
  }
  return input;
}

/// One step on the GPU in fixed memory.
class FixedStep {
 public:
  FixedStep(const Router& router, const RouteArgs& host, const RankStream& stream)
      : router_(router),
        stream_(stream),
        x_(to_device(host.x, stream)),
        gate_(to_device(host.gate.weight, stream)),
        mask_(to_device(host.mask, stream)),
        sequence_ids_(to_device(host.sequence_ids, stream)),
        grad_weights_(device_tensor(DType::kF32, {kTokens, 4}, stream)),
        grad_x(device_tensor(DType::kBF16, {kTokens, 40}, stream)),
        grad_gate(device_tensor(DType::kF32, {kExperts, 40}, stream)) {
    const OwnedTensor grads =
        reference::to_tensor(DType::kF32, {kTokens, 4}, some_grad_weights(kTokens, 4));
    copy_into(grad_weights_, grads.view);
    stream.synchronize();
  }

  void fill(const RouteArgs& host) const {
    copy_into(x_, host.x);
    copy_into(gate_, host.gate.weight);
    copy_into(mask_, host.mask);
    copy_into(sequence_ids_, host.sequence_ids);
    cuda_ok(cudaMemsetAsync(grad_x.view.data, 0xff, static_cast<size_t>(grad_x.view.num_bytes()),
                            stream_.get()));
  }

  void run() {
    output = router_.route({.x = x_.view,
                            .gate = {.weight = gate_.view},
                            .mask = mask_.view,
                            .sequence_ids = sequence_ids_.view,
                            .num_sequences = 3,
                            .stream = stream_.view()});
    losses = router_.losses(output, {}, stream_.view());
    router_.backward({.x = x_.view,
                      .gate = {.weight = gate_.view},
                      .output = &output,
                      .grad_weights = grad_weights_.view,
                      .grad_x = grad_x.view,
                      .grad_gate = grad_gate.view,
                      .stream = stream_.view()});
  }

  /// All results, as bytes.
  std::vector<std::vector<std::byte>> results() const {
    const Routing routing = output.routing();
    return {to_host(routing.expert_ids, stream_),
            to_host(routing.weights, stream_),
            to_host(output.statistics.device_counts.view, stream_),
            to_host(losses.device_values.view, stream_),
            to_host(grad_x.view, stream_),
            to_host(grad_gate.view, stream_)};
  }

 private:
  void copy_into(const OwnedTensor& to, const ConstTensorView& from) const {
    cuda_ok(cudaMemcpyAsync(to.view.data, from.data, static_cast<size_t>(from.num_bytes()),
                            cudaMemcpyHostToDevice, stream_.get()));
  }

  const Router& router_;
  const RankStream& stream_;
  OwnedTensor x_, gate_, mask_, sequence_ids_, grad_weights_;

 public:
  OwnedTensor grad_x, grad_gate;
  RouterOutput output;
  RouterLosses losses;
};

TEST_F(CudaRouterCalls, AreCapturedInAGraphAndReplayedWithOtherTokens) {
  const Router router(graph_config());
  const RankStream stream;
  const RouterRun first(graph_input(1));
  FixedStep eager(router, first.args, stream);
  FixedStep captured(router, first.args, stream);
  for (const bool is_warm : {false, true}) {  // the first calls may be captured too
    if (is_warm) captured.run();
    cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
    captured.run();
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(stream.get(), &graph));
    cudaGraphExec_t executable = nullptr;
    cuda_ok(cudaGraphInstantiate(&executable, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
    for (const uint64_t seed : {2, 3, 4, 2}) {  // 3: padding only
      SCOPED_TRACE(seed);
      const RouterRun run(graph_input(seed));
      eager.fill(run.args);
      eager.run();
      captured.fill(run.args);
      cuda_ok(cudaGraphLaunch(executable, stream.get()));
      EXPECT_EQ(captured.results(), eager.results());
    }
    stream.synchronize();
    cuda_ok(cudaGraphExecDestroy(executable));
  }
}

TEST_F(CudaRouterCalls, FollowTheStreamOfTheCallingThread) {
  const Router router(graph_config());
  const RankStream stream;
  const RouterRun run(graph_input(1));
  FixedStep wanted(router, run.args, stream);
  wanted.run();
  const OwnedTensor x = to_device(run.args.x, stream);
  const OwnedTensor gate = to_device(run.args.gate.weight, stream);
  const OwnedTensor mask = to_device(run.args.mask, stream);
  const OwnedTensor ids = to_device(run.args.sequence_ids, stream);
  stream.synchronize();
  const Stream own{cudaStreamPerThread};
  const RouterOutput output = router.route({.x = x.view,
                                            .gate = {.weight = gate.view},
                                            .mask = mask.view,
                                            .sequence_ids = ids.view,
                                            .num_sequences = 3,
                                            .stream = own});
  const RouterLosses losses = router.losses(output, {}, own);
  EXPECT_EQ(losses.on_host(own).aux, wanted.losses.on_host(stream.view()).aux);
  EXPECT_EQ(output.statistics.on_host(own).routes_per_expert,
            wanted.output.statistics.on_host(stream.view()).routes_per_expert);
}

TEST_F(CudaRouterCalls, SumStatisticsAndTakeTheSums) {
  RouterConfig config = graph_config();
  config.aux_loss_coeffs = {.batch = 0.3, .sequence = 0.7, .global_batch = 0.11};
  const Router router(config);
  const RankStream stream;
  const auto input = graph_input(1);
  const RouterRun run(input);
  const RouterOutput on_cpu = router.route(run.args);
  FixedStep step(router, run.args, stream);
  step.run();
  const RouterStatistics& own = step.output.statistics;
  EXPECT_THAT([&] { (void)own.load(); },
              testing::ThrowsMessage<Error>(HasSubstr("on_host().load()")));
  EXPECT_EQ(own.on_host(stream.view()).load(), on_cpu.statistics.load());
  const RouterStatistics twice = router.sum(own, own, stream.view());
  const RouterStatistics twice_on_cpu = router.sum(on_cpu.statistics, on_cpu.statistics);
  EXPECT_EQ(twice.on_host(stream.view()).routes_per_expert, twice_on_cpu.routes_per_expert);
  EXPECT_EQ(twice.on_host(stream.view()).num_tokens, twice_on_cpu.num_tokens);
  const LossCounts counts{.statistics = &twice,
                          .total_sequences = 8,
                          .total_tokens = 100,
                          .batch = nullptr,
                          .sequence = &own};
  const LossCounts counts_on_cpu{.statistics = &twice_on_cpu,
                                 .total_sequences = 8,
                                 .total_tokens = 100,
                                 .batch = nullptr,
                                 .sequence = &on_cpu.statistics};
  const RouterLosses got = router.losses(step.output, counts, stream.view()).on_host(stream.view());
  const RouterLosses wanted = router.losses(on_cpu, counts_on_cpu);
  EXPECT_NEAR(got.aux_terms.batch, wanted.aux_terms.batch, 1e-6 * wanted.aux_terms.batch);
  EXPECT_NEAR(got.aux_terms.sequence, wanted.aux_terms.sequence, 1e-6 * wanted.aux_terms.sequence);
  EXPECT_NEAR(got.aux_terms.global_batch, wanted.aux_terms.global_batch,
              1e-6 * wanted.aux_terms.global_batch);
  EXPECT_NEAR(got.z, wanted.z, 1e-6 * wanted.z);
  EXPECT_NEAR(got.aux, wanted.aux, 1e-6 * wanted.aux);
}

TEST_F(CudaRouterCalls, MoveTheExpertBiasAsTheCpu) {
  const Router router(graph_config());
  const RankStream stream;
  const RouterRun run(graph_input(1));
  const RouterOutput on_cpu = router.route(run.args);
  FixedStep step(router, run.args, stream);
  step.run();
  for (const bool centred : {false, true}) {
    std::vector<float> wanted(kExperts);
    for (size_t e = 0; e < wanted.size(); ++e) wanted[e] = 0.1F * static_cast<float>(e);
    const OwnedTensor bias = to_device({wanted.data(), {kExperts}}, stream);
    stream.synchronize();
    const BiasUpdate update{.rate = 0.003, .centred = centred};
    update_expert_bias({wanted.data(), {kExperts}}, on_cpu.statistics, update);
    update_expert_bias(bias.view, step.output.statistics, update, stream.view());
    EXPECT_EQ(values_of<float>(to_host(bias.view, stream)), wanted);
  }
}

TEST_F(CudaRouterCalls, LeaveWrongValuesToThePlan) {
  const Router router({.num_experts = 8, .top_k = 2, .width = 16, .dtype = DType::kF32});
  const RankStream stream;
  const std::vector<float> x(64, 1.0F);
  const std::vector<float> gate(128, 0.5F);
  const std::vector<int64_t> forced = {0, 8, -1, -2, int64_t{1} << 32, 3, 4, 5};
  const OwnedTensor x_there = to_device({x.data(), {4, 16}}, stream);
  const OwnedTensor gate_there = to_device({gate.data(), {8, 16}}, stream);
  const OwnedTensor forced_there = to_device({forced.data(), {4, 2}}, stream);
  const RouterOutput output = router.route({.x = x_there.view,
                                            .gate = {.weight = gate_there.view},
                                            .forced_ids = forced_there.view,
                                            .stream = stream.view()});
  const auto ids = values_of<int32_t>(to_host(output.routing().expert_ids, stream));
  const auto weights = values_of<float>(to_host(output.routing().weights, stream));
  EXPECT_EQ(ids[0], 0);
  EXPECT_GE(ids[1], 8);  // still no expert
  EXPECT_EQ(ids[2], -1);
  EXPECT_GE(ids[3], 8);
  EXPECT_GE(ids[4], 8);
  EXPECT_EQ(ids[5], 3);
  for (const size_t route : {1, 2, 3, 4}) EXPECT_EQ(weights[route], 0.0F);
  EXPECT_THAT(output.statistics.on_host(stream.view()).load(),
              testing::ElementsAre(1, 0, 0, 1, 1, 1, 0, 0));
}

std::string refusal_of_config(const RouterConfig& config) {
  const Router router(config);
  const RankStream stream;
  const OwnedTensor x = device_tensor(config.dtype, {2, config.width}, stream);
  const OwnedTensor gate = device_tensor(config.dtype, {config.num_experts, config.width}, stream);
  try {
    (void)router.route({.x = x.view, .gate = {.weight = gate.view}, .stream = stream.view()});
    return {};
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    return error.what();
  }
}

TEST_F(CudaRouterCalls, RefuseWhatGpusDoNotSupport) {
  EXPECT_THAT(refusal_of_config({.num_experts = 4, .top_k = 2, .width = 8, .dtype = DType::kF64}),
              HasSubstr("got fp64"));
  EXPECT_THAT(refusal_of_config({.num_experts = 1025, .top_k = 2, .width = 8}),
              HasSubstr("at most 1024 experts, got 1025"));
  EXPECT_THAT(refusal_of_config({.num_experts = 64, .top_k = 33, .width = 8}),
              HasSubstr("top_k of at most 32, got 33"));
}

TEST_F(CudaRouterCalls, RefuseTensorsOnSeveralDevices) {
  const Router router({.num_experts = 4, .top_k = 2, .width = 8});
  const RankStream stream;
  const std::vector<float> memory(64, 1.0F);
  const ConstTensorView x_here(memory.data(), {3, 8});
  const ConstTensorView gate_here(memory.data(), {4, 8});
  const OwnedTensor x = to_device(x_here, stream);
  const OwnedTensor gate = to_device(gate_here, stream);
  const auto message = [&](const RouteArgs& args) {
    return message_of([&] { (void)router.route(args); });
  };
  EXPECT_THAT(message({.x = x.view, .gate = {.weight = gate_here}}),
              HasSubstr("the gate must be on GPU 0, it is in host memory"));
  EXPECT_THAT(message({.x = x_here, .gate = {.weight = gate.view}}),
              HasSubstr("the gate must be in host memory"));
  const RouterOutput here = router.route({.x = x_here, .gate = {.weight = gate_here}});
  const RouterOutput there =
      router.route({.x = x.view, .gate = {.weight = gate.view}, .stream = stream.view()});
  EXPECT_THAT(message_of([&] {
                (void)router.losses(there, {.statistics = &here.statistics}, stream.view());
              }),
              HasSubstr("must be where this rank's are, on GPU 0; they are in host memory"));
  EXPECT_THAT(message_of([&] { (void)router.sum(here.statistics, there.statistics); }),
              HasSubstr("must be on the same device"));
  EXPECT_THAT(message_of([&] {
                router.backward({.x = x_here, .gate = {.weight = gate.view}, .output = &there});
              }),
              HasSubstr("x must be on GPU 0, it is in host memory"));
}

TEST_F(CudaRouterCalls, AreNotReadWhileAGraphIsCaptured) {
  const Router router(graph_config());
  const RankStream stream;
  const RouterRun run(graph_input(1));
  FixedStep step(router, run.args, stream);
  cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  step.run();
  const std::string message = message_of([&] { (void)step.losses.on_host(stream.view()); });
  cudaGraph_t graph = nullptr;
  cuda_ok(cudaStreamEndCapture(stream.get(), &graph));
  cuda_ok(cudaGraphDestroy(graph));
  EXPECT_THAT(message, HasSubstr("while a graph is captured"));
}

}  // namespace
}  // namespace crossdock
