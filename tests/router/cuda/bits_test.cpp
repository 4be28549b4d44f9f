// Which bits of a router on a GPU are defined, and what they depend on.
#include <gtest/gtest.h>

#include <numeric>
#include <utility>

#include "router/backend.hpp"
#include "router/cuda/both_devices.hpp"

namespace crossdock {
namespace {

using CudaRouterBits = CudaTest;

RouterConfig wide_config(DType dtype) {
  return {.num_experts = 128,
          .top_k = 8,
          .width = 520,  // more than two blocks of 256
          .dtype = dtype,
          .score = Score::kSigmoid,
          .aux_loss_coeff = 0.1,
          .z_loss_coeff = 0.01};
}

/// A router whose kernels use less shared memory than GPU 0 has.
class SmallRouter {
 public:
  SmallRouter(const RouterConfig& config, int64_t shared_memory)
      : config_(config),
        backend_(router::make_device_backend(config, {.kind = DeviceKind::kCuda, .index = 0},
                                             shared_memory)) {}

  const RouterConfig& config() const { return config_; }
  RouterOutput route(const RouteArgs& args) const {
    RouterOutput output = backend_->route(args);
    output.config = config_;
    return output;
  }
  RouterLosses losses(const RouterOutput& output, const LossCounts& counts, Stream stream) const {
    return backend_->losses(output, counts, stream);
  }
  void backward(const RouterBackwardArgs& args) const { backend_->backward(args); }

 private:
  RouterConfig config_;
  std::unique_ptr<router::Backend> backend_;
};

template <typename AnyRouter>
RouterValues run_on_gpu(const AnyRouter& router, const RouteArgs& args,
                        const BackwardCase& backward) {
  const RankStream stream;
  return run_router(router, args, backward, OnGpu{stream});
}

// The CPU's blocks of 256 fma: any inputs, any widths.
TEST_F(CudaRouterBits, LogitsOfAnFp32GateAreThoseOfTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t E : {5, 60, 130}) {
      for (const int64_t width : {3, 256, 1000}) {
        for (const double jitter : {0.0, 0.1}) {
          SCOPED_TRACE(testing::Message() << name_of(dtype) << " E " << E << " D " << width);
          RouterConfig config = wide_config(dtype);
          config.num_experts = E;
          config.top_k = 2;
          config.width = width;
          config.jitter = jitter;
          const auto input = make_router_input(config, 70);
          const RouterRun run(input);
          const OwnedTensor gate = reference::to_tensor(DType::kF32, {E, width}, input.gate);
          RouteArgs args = run.args;
          args.gate.weight = gate.view;
          const RouterValues got = run_on_gpu(run.router(), args, {});
          const RouterValues wanted = run_router(run.router(), args, {}, OnHost{});
          ASSERT_EQ(got.logits, wanted.logits);
        }
      }
    }
  }
}

TEST_F(CudaRouterBits, LogitsOfTensorCoresAreThoseOfTheCpuUpToRounding) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const RouterRun run(make_router_input(wide_config(dtype), 200));
    const RouterValues got = run_on_gpu(run.router(), run.args, {});
    const RouterValues wanted = run_router(run.router(), run.args, {}, OnHost{});
    expect_near("logits", got.logits, wanted.logits, 2e-6);
  }
}

// Rows of a large input as a separate input.
RouterValues run_some(const RouterRun& run, int64_t first, int64_t count) {
  RouteArgs args = run.args;
  const int64_t bytes = args.x.row_bytes() * first;
  args.x = {
      static_cast<const std::byte*>(args.x.data) + bytes, args.x.dtype, {count, args.x.shape[1]}};
  // Without losses, whose gradients depend on all tokens.
  return run_on_gpu(run.router(), args,
                    {.grad_weights = some_grad_weights(count, 8), .grad_losses = 0.0});
}

template <typename T>
std::vector<T> rows_of(const std::vector<T>& values, int64_t first, int64_t count, int64_t width) {
  const auto begin = values.begin() + first * width;
  return {begin, begin + count * width};
}

TEST_F(CudaRouterBits, OfATokenAreTheSameInBatchesOf1And17And4096) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    SCOPED_TRACE(name_of(dtype));
    RouterConfig config = wide_config(dtype);
    config.width = 264;
    const RouterRun run(make_router_input(config, 4096));
    const RouterValues all = run_some(run, 0, 4096);
    // Gradients of the weights repeat every 11 tokens.
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {0, 17}, {2200, 17}}) {
      const RouterValues some = run_some(run, first, count);
      EXPECT_EQ(some.logits, rows_of(all.logits, first, count, 128));
      EXPECT_EQ(some.ids, rows_of(all.ids, first, count, 8));
      EXPECT_EQ(some.weights, rows_of(all.weights, first, count, 8));
      EXPECT_EQ(some.grad_logits, rows_of(all.grad_logits, first, count, 128));
      EXPECT_EQ(some.grad_x, rows_of(all.grad_x, first, count, 264));
    }
  }
}

TEST_F(CudaRouterBits, AreTheSameRunToRun) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    RouterConfig config = wide_config(dtype);
    auto input = make_router_input(config, 2000);
    const RouterRun run(input);
    const BackwardCase backward{.grad_weights = some_grad_weights(2000, 8)};
    const RouterValues first = run_on_gpu(run.router(), run.args, backward);
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(run_on_gpu(run.router(), run.args, backward) == first) << name_of(dtype);
    }
  }
}

// The same values at addresses that are not aligned to 16 bytes.
TEST_F(CudaRouterBits, DoNotDependOnTheAlignmentOfMemory) {
  const auto input = make_router_input(wide_config(DType::kBF16), 90);
  const RouterRun run(input);
  const RouterValues wanted = run_on_gpu(run.router(), run.args, {});
  const RankStream stream;
  const OnGpu gpu{stream};
  const auto shifted = [&](const ConstTensorView& host) {
    OwnedTensor tensor = device_tensor(host.dtype, {host.num_elements() + 1}, stream);
    auto* data = static_cast<std::byte*>(tensor.view.data) + 2;
    cuda_ok(cudaMemcpyAsync(data, host.data, static_cast<size_t>(host.num_bytes()),
                            cudaMemcpyHostToDevice, stream.get()));
    tensor.view = TensorView(data, host.dtype, host.shape, stream.device());
    return tensor;
  };
  const OwnedTensor x = shifted(run.args.x);
  const OwnedTensor gate = shifted(run.args.gate.weight);
  const OwnedTensor grad_x = shifted(run.args.x);
  const OwnedTensor grad_gate = device_tensor(DType::kF32, {128, 520}, stream);
  const RouterOutput output =
      run.router().route({.x = x.view, .gate = {.weight = gate.view}, .stream = stream.view()});
  run.router().backward({.x = x.view,
                         .gate = {.weight = gate.view},
                         .output = &output,
                         .grad_losses = 0.5,
                         .grad_x = grad_x.view,
                         .grad_gate = grad_gate.view,
                         .stream = stream.view()});
  EXPECT_EQ(values_of<float>(gpu.get(output.logits.view(DType::kF32, {90, 128}))), wanted.logits);
  const std::vector<std::byte> bytes = gpu.get(grad_x.view);
  EXPECT_EQ(reference::to_values(ConstTensorView(bytes.data(), DType::kBF16, {90, 520})),
            wanted.grad_x);
  EXPECT_EQ(values_of<float>(gpu.get(grad_gate.view)), wanted.grad_gate);
}

TEST_F(CudaRouterBits, DoNotDependOnTheTile) {
  const RouterRun run(make_router_input(wide_config(DType::kBF16), 9000));
  const RouterValues wanted = run_on_gpu(run.router(), run.args, {});
  const SmallRouter small(run.router().config(), int64_t{90} << 10);  // the small tiles only
  EXPECT_EQ(run_on_gpu(small, run.args, {}).logits, wanted.logits);
}

// sm_90a has its own kernels, which need more shared memory than this limit allows. On other GPUs
// both runs use the same kernels.
TEST_F(CudaRouterBits, OfKernelsForOneArchitectureAreThoseOfTheOthers) {
  struct Shape {
    int64_t E;
    int64_t D;
  };
  // Whole blocks of 64 columns, and others; wide tokens, of which a slice has several blocks.
  const std::vector<Shape> shapes = {{24, 520},  {33, 576},  {60, 520},  {64, 192},
                                     {72, 576},  {97, 520},  {128, 520}, {128, 576},
                                     {200, 520}, {200, 576}, {32, 7168}, {128, 7168}};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const Shape& shape : shapes) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << name_of(dtype) << " E " << shape.E << " D " << shape.D
                                        << " adds " << accumulate);
        RouterConfig config = wide_config(dtype);
        config.num_experts = shape.E;
        config.width = shape.D;
        auto input = make_router_input(config, 1500);
        input.mask.resize(1500);
        for (size_t t = 0; t < input.mask.size(); ++t) input.mask[t] = t % 90 < 2 ? 1 : 0;
        const RouterRun run(input);
        const BackwardCase backward{.grad_weights = some_grad_weights(1500, 8),
                                    .accumulate = accumulate};
        const RouterValues wanted = run_on_gpu(run.router(), run.args, backward);
        const SmallRouter plain(run.router().config(), int64_t{16} << 10);
        EXPECT_TRUE(run_on_gpu(plain, run.args, backward) == wanted);
      }
    }
  }
}

// Calls with few arguments use separate kernels.
TEST_F(CudaRouterBits, DoNotDependOnWhatElseACallIsGivenOrAskedFor) {
  for (const Score score :
       {Score::kSoftmax, Score::kSoftmaxAfterTopK, Score::kSigmoid, Score::kSqrtSoftplus}) {
    for (const int64_t E : {32, 64, 128, 256}) {
      SCOPED_TRACE(testing::Message() << name_of(score) << " E " << E);
      RouterConfig config = wide_config(DType::kBF16);
      config.num_experts = E;
      config.score = score;
      config.aux_loss_coeff = 0.0;
      config.z_loss_coeff = 0.0;
      auto input = make_router_input(config, 700);
      const RouterRun few(input);
      BackwardCase backward{.grad_weights = some_grad_weights(700, 8), .only_weights = true};
      const RouterValues got = run_on_gpu(few.router(), few.args, backward);
      input.mask.assign(700, 0);
      const RouterRun more(input);
      backward.only_weights = false;
      const RouterValues wanted = run_on_gpu(more.router(), more.args, backward);
      EXPECT_EQ(got.ids, wanted.ids);
      EXPECT_EQ(got.weights, wanted.weights);
      EXPECT_EQ(got.routes_per_expert, wanted.routes_per_expert);
      EXPECT_EQ(got.num_tokens, wanted.num_tokens);
      EXPECT_EQ(got.grad_x, wanted.grad_x);
      EXPECT_EQ(got.grad_gate, wanted.grad_gate);
    }
  }
}

TEST_F(CudaRouterBits, ATokenThatIsNotANumberReachesNoOther) {
  const RouterConfig config = wide_config(DType::kBF16);
  auto input = make_router_input(config, 80);
  const RouterValues clean = run_on_gpu(RouterRun(input).router(), RouterRun(input).args,
                                        {.grad_weights = some_grad_weights(80, 8)});
  for (int64_t d = 0; d < config.width; ++d) {
    input.x[static_cast<size_t>(33 * config.width + d)] = std::nan("");
  }
  const RouterRun run(input);
  const RouterValues got =
      run_on_gpu(run.router(), run.args, {.grad_weights = some_grad_weights(80, 8)});
  for (int64_t t = 0; t < 80; ++t) {
    if (t == 33) continue;
    EXPECT_EQ(rows_of(got.logits, t, 1, 128), rows_of(clean.logits, t, 1, 128)) << t;
    EXPECT_EQ(rows_of(got.ids, t, 1, 8), rows_of(clean.ids, t, 1, 8)) << t;
    EXPECT_EQ(rows_of(got.weights, t, 1, 8), rows_of(clean.weights, t, 1, 8)) << t;
    for (const float grad : rows_of(got.grad_logits, t, 1, 128)) EXPECT_FALSE(std::isnan(grad));
    for (const double grad : rows_of(got.grad_x, t, 1, 520)) EXPECT_FALSE(std::isnan(grad));
  }
  // As padding it affects nothing at all.
  input.mask.assign(80, 0);
  input.mask[33] = 1;
  const RouterRun padded(input);
  const RouterValues without =
      run_on_gpu(padded.router(), padded.args, {.grad_weights = some_grad_weights(80, 8)});
  for (const float grad : without.grad_gate) ASSERT_FALSE(std::isnan(grad));
  for (const double grad : without.grad_x) ASSERT_FALSE(std::isnan(grad));
  EXPECT_FALSE(std::isnan(without.losses.aux + without.losses.z));
}

// Models' shapes; some tokens are compared with the CPU.
TEST_F(CudaRouterBits, LargeBatchesAreThoseOfTheCpu) {
  struct Model {
    int64_t T;
    int64_t D;
    int64_t E;
    int64_t K;
  };
  for (const Model& model : {Model{8192, 2048, 128, 8}, Model{4096, 2880, 32, 4},
                             Model{4096, 7168, 256, 8}, Model{8192, 2048, 512, 10}}) {
    for (const DType gate_dtype : {DType::kBF16, DType::kF32}) {
      SCOPED_TRACE(testing::Message() << model.E << " experts, gate " << name_of(gate_dtype));
      RouterConfig config{.num_experts = model.E,
                          .top_k = model.K,
                          .width = model.D,
                          .dtype = DType::kBF16,
                          .aux_loss_coeff = 0.1};
      auto input = exact_input(config, model.T);
      const RouterRun run(input);
      const OwnedTensor gate = reference::to_tensor(gate_dtype, {model.E, model.D}, input.gate);
      RouteArgs args = run.args;
      args.gate.weight = gate.view;
      const RouterValues got =
          run_on_gpu(run.router(), args, {.grad_weights = some_grad_weights(model.T, model.K)});
      RouteArgs few = args;
      few.x = {args.x.data, DType::kBF16, {64, model.D}};
      const RouterValues wanted = run_router(run.router(), few, {}, OnHost{});
      EXPECT_EQ(rows_of(got.logits, 0, 64, model.E), wanted.logits);
      const auto sum =
          std::accumulate(got.routes_per_expert.begin(), got.routes_per_expert.end(), int64_t{0});
      EXPECT_EQ(sum, model.T * model.K);
    }
  }
}

}  // namespace
}  // namespace crossdock
