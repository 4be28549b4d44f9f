// What the bits of a grouped product depend on, and the order in which kernels run.

#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "ops/cuda/product_case.hpp"

namespace crossdock::ops {
namespace {

class CudaProductBits : public CudaTest, public ::testing::WithParamInterface<ProductKernels> {};

INSTANTIATE_TEST_SUITE_P(All, CudaProductBits,
                         ::testing::Values(ProductKernels::kFastest, ProductKernels::kPlain),
                         [](const auto& info) {
                           return std::string(info.param == ProductKernels::kPlain ? "plain"
                                                                                   : "fastest");
                         });

ProductCase real_case(std::vector<int64_t> counts) {
  return ProductCase({.counts = std::move(counts), .N = 576, .K = 712, .whole_numbers = false});
}

TEST_P(CudaProductBits, AreTheSameInEveryRun) {
  const ProductCase test = real_case(ragged_counts());
  DeviceProducts gpu(test, GetParam());
  const std::vector<float> forward = gpu.forward(DType::kBF16);
  const std::vector<float> dx = gpu.dx(DType::kBF16);
  const std::vector<float> dw = gpu.dw(DType::kF32);
  for (int run = 0; run < 20; ++run) {
    expect_same("forward", gpu.forward(DType::kBF16), forward);
    expect_same("dX", gpu.dx(DType::kBF16), dx);
    expect_same("dW", gpu.dw(DType::kF32), dw);
  }
}

TEST_P(CudaProductBits, DoNotDependOnTheNumberOfSms) {
  const ProductCase test = real_case(ragged_counts());
  DeviceProducts all(test, GetParam());
  for (const int max_sms : {1, 2, 7, 64}) {
    DeviceProducts some(test, GetParam(), max_sms);
    expect_same("forward", some.forward(DType::kBF16), all.forward(DType::kBF16));
    expect_same("dX", some.dx(DType::kBF16), all.dx(DType::kBF16));
    expect_same("dW", some.dw(DType::kF32), all.dw(DType::kF32));
  }
}

// The first row of `test`, with other rows after it.
ProductCase in_batch(const ProductCase& test, int64_t batch) {
  ProductCase larger = real_case({batch});
  larger.w = test.w;
  std::copy_n(test.x.begin(), test.shape().K, larger.x.begin());
  std::copy_n(test.grad.begin(), test.shape().N, larger.grad.begin());
  return larger;
}

TEST_P(CudaProductBits, OfARowDoNotDependOnTheRowsBesideIt) {
  const ProductCase alone = real_case({1});
  DeviceProducts gpu(alone, GetParam());
  for (const DType result : {DType::kBF16, DType::kF32}) {
    const std::vector<float> forward = gpu.forward(result);
    const std::vector<float> dx = gpu.dx(result);
    for (const int64_t batch : {17, 300, 4096}) {
      const ProductCase test = in_batch(alone, batch);
      DeviceProducts larger(test, GetParam());
      std::vector<float> got = larger.forward(result);
      got.resize(forward.size());
      expect_same("forward", got, forward);
      got = larger.dx(result);
      got.resize(dx.size());
      expect_same("dX", got, dx);
    }
  }
}

// The same row everywhere: all results are equal.
TEST_P(CudaProductBits, OfARowDoNotDependOnItsPosition) {
  ProductCase test = real_case({700, 1, 300});
  const int64_t N = test.shape().N;
  const int64_t K = test.shape().K;
  for (int64_t row = 1; row < test.R; ++row) {
    std::copy_n(test.x.begin(), K, test.x.begin() + row * K);
    std::copy_n(test.grad.begin(), N, test.grad.begin() + row * N);
  }
  for (int64_t e = 1; e < 3; ++e) {
    std::copy_n(test.w.begin(), N * K, test.w.begin() + e * N * K);
  }
  DeviceProducts gpu(test, GetParam());
  const auto expect_equal_rows = [&](const char* name, const std::vector<float>& got,
                                     int64_t width) {
    const std::vector<float> first(got.begin(), got.begin() + width);
    for (int64_t row = 1; row < test.R; ++row) {
      expect_same(name, {got.begin() + row * width, got.begin() + (row + 1) * width}, first);
    }
  };
  expect_equal_rows("forward", gpu.forward(DType::kBF16), N);
  expect_equal_rows("dX", gpu.dx(DType::kBF16), K);
}

// A graph of all products, in fixed memory.
class ProductGraph {
 public:
  ProductGraph(DeviceProducts& gpu, const ProductCase& test)
      : gpu_(gpu),
        forward_(gpu.make(DType::kBF16, {test.R, test.shape().N})),
        dx_(gpu.make(DType::kBF16, {test.R, test.shape().K})),
        dw_(gpu.make(DType::kBF16, gpu.w.view.shape)),
        sums_(gpu.make(DType::kF32, gpu.w.view.shape)) {
    gpu.stream.synchronize();
    cuda_ok(cudaStreamBeginCapture(gpu.stream.get(), cudaStreamCaptureModeGlobal));
    ProductForwardArgs args = gpu.forward_args();
    args.out = forward_.view;
    gpu.products.forward(args, gpu.stream.view());
    gpu.products.dx(
        {.grad = gpu.grad.view, .w = gpu.w.view, .segments = gpu.segments(), .out = dx_.view},
        gpu.stream.view());
    for (const OwnedTensor* out : {&dw_, &sums_}) {
      gpu.products.dw(
          {.grad = gpu.grad.view, .x = gpu.x.view, .segments = gpu.segments(), .out = out->view},
          gpu.stream.view());
    }
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(gpu.stream.get(), &graph));
    cuda_ok(cudaGraphInstantiate(&executable_, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
  }
  ~ProductGraph() { cudaGraphExecDestroy(executable_); }
  ProductGraph(const ProductGraph&) = delete;
  ProductGraph& operator=(const ProductGraph&) = delete;

  /// Replays with the operands of `test`, which has the sizes of the captured one.
  void expect_matches(const ProductCase& test) {
    replace(gpu_.x, encode(test.x, DType::kBF16));
    replace(gpu_.grad, encode(test.grad, DType::kBF16));
    replace(gpu_.w, encode(test.w, DType::kBF16));
    replace(gpu_.starts, bytes_of(ConstTensorView(test.starts.data(), {test.num_experts() + 1})));
    replace(gpu_.counts,
            bytes_of(ConstTensorView(test.shape().counts.data(), {test.num_experts()})));
    cuda_ok(cudaGraphLaunch(executable_, gpu_.stream.get()));
    expect_same("forward", gpu_.download(forward_), rounded(test.forward(false), DType::kBF16));
    expect_same("dX", gpu_.download(dx_), rounded(test.dx(), DType::kBF16));
    expect_same("dW", gpu_.download(dw_), rounded(test.dw(), DType::kBF16));
    expect_same("dW in fp32", gpu_.download(sums_), test.dw());
  }

 private:
  void replace(const OwnedTensor& tensor, const std::vector<std::byte>& bytes) {
    cuda_ok(cudaMemcpyAsync(tensor.view.data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice,
                            gpu_.stream.get()));
    gpu_.stream.synchronize();
  }

  DeviceProducts& gpu_;
  OwnedTensor forward_;
  OwnedTensor dx_;
  OwnedTensor dw_;
  OwnedTensor sums_;
  cudaGraphExec_t executable_ = nullptr;
};

TEST_P(CudaProductBits, FollowTheSegmentsOfEveryReplay) {
  constexpr int64_t kCapacity = 1500;
  const auto make_case = [&](const std::vector<int64_t>& counts, unsigned seed) {
    const int64_t used = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    return ProductCase({.counts = counts, .N = 320, .K = 264, .tail_rows = kCapacity - used}, seed);
  };
  const ProductCase first = make_case({100, 0, 900, 64, 1}, 1);
  DeviceProducts gpu(first, GetParam());
  ProductGraph graph(gpu, first);
  graph.expect_matches(first);
  const std::vector<std::vector<int64_t>> cases = {{0, 0, 0, 0, 0},
                                                   {1500, 0, 0, 0, 0},
                                                   {1, 2, 3, 4, 5},
                                                   {0, 700, 0, 800, 0},
                                                   {300, 300, 300, 300, 300}};
  unsigned seed = 2;
  for (const std::vector<int64_t>& counts : cases) {
    graph.expect_matches(make_case(counts, seed++));
  }
}

// Kernels of different streams run at the same time and must not share counters.
TEST_P(CudaProductBits, AreTheSameInStreamsThatOverlap) {
  const ProductCase test({.counts = random_counts(16, 200, 3), .N = 384, .K = 264});
  DeviceProducts gpu(test, GetParam());
  const std::vector<float> forward = rounded(test.forward(false), DType::kBF16);
  const std::vector<float> dw = test.dw();
  const RankStream streams[3];
  OwnedTensor rows[3];
  OwnedTensor sums[3];
  for (int i = 0; i < 3; ++i) {
    rows[i] = gpu.make(DType::kBF16, {test.R, 384});
    sums[i] = gpu.make(DType::kF32, gpu.w.view.shape);
  }
  gpu.stream.synchronize();
  for (int round = 0; round < 50; ++round) {
    for (int i = 0; i < 3; ++i) {
      ProductForwardArgs args = gpu.forward_args();
      args.out = rows[i].view;
      gpu.products.forward(args, streams[i].view());
      gpu.products.dw(
          {.grad = gpu.grad.view, .x = gpu.x.view, .segments = gpu.segments(), .out = sums[i].view},
          streams[i].view());
    }
  }
  for (const RankStream& stream : streams) stream.synchronize();
  for (int i = 0; i < 3; ++i) {
    expect_same("forward", gpu.download(rows[i]), forward);
    expect_same("dW", gpu.download(sums[i]), dw);
  }
}

}  // namespace
}  // namespace crossdock::ops
