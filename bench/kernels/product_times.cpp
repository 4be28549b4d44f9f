// Prints how long grouped products take on GPU 0, as JSON: the products of three models, forward,
// dX, dW in bf16 and fp32, and forward with SwiGLU. Each time is the median over replays of a graph
// with several launches.
//
//   build/cuda/bench/kernels/product_times > times.json

#include <cuda_runtime.h>

#include <cstdio>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>

#include "bench/kernels/product_cases.hpp"
#include "bench/median.hpp"
#include "ops/grouped_product.hpp"

namespace crossdock::bench {
namespace {

constexpr Device kGpu{.kind = DeviceKind::kCuda, .index = 0};
constexpr int kLaunches = 4;  // in a graph
constexpr int kWarmUps = 3;
constexpr int kReplays = 15;

void check_cuda_call(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Device memory, freed at the end of the scope.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t num_bytes) : num_bytes_(num_bytes) {
    check_cuda_call(cudaMalloc(&data_, static_cast<size_t>(num_bytes)));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return data_; }

  /// Random numbers around 0, from a block that is repeated.
  void fill_bf16() const {
    std::vector<uint16_t> block(size_t{4} << 20);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal(0.0F, 0.5F);
    for (uint16_t& value : block) value = to_bf16(normal(generator)).bits;
    const auto block_bytes = static_cast<int64_t>(block.size() * sizeof(uint16_t));
    for (int64_t offset = 0; offset < num_bytes_; offset += block_bytes) {
      check_cuda_call(cudaMemcpy(static_cast<std::byte*>(data_) + offset, block.data(),
                                 static_cast<size_t>(std::min(block_bytes, num_bytes_ - offset)),
                                 cudaMemcpyHostToDevice));
    }
  }
  void fill(const std::vector<int64_t>& values) const {
    check_cuda_call(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(int64_t), cudaMemcpyHostToDevice));
  }

 private:
  int64_t num_bytes_;
  void* data_ = nullptr;
};

/// Milliseconds of one launch.
double time_launch(cudaStream_t stream, const std::function<void()>& launch) {
  launch();
  check_cuda_call(cudaStreamSynchronize(stream));
  check_cuda_call(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < kLaunches; ++i) launch();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda_call(cudaStreamEndCapture(stream, &graph));
  check_cuda_call(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda_call(cudaEventCreate(&begin));
  check_cuda_call(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = 0; i < kWarmUps + kReplays; ++i) {
    check_cuda_call(cudaEventRecord(begin, stream));
    check_cuda_call(cudaGraphLaunch(executable, stream));
    check_cuda_call(cudaEventRecord(end, stream));
    check_cuda_call(cudaStreamSynchronize(stream));
    float milliseconds = 0.0F;
    check_cuda_call(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= kWarmUps) times.push_back(static_cast<double>(milliseconds) / kLaunches);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return median(times);
}

class CaseTimer {
 public:
  CaseTimer(const ProductCase& test, ops::GroupedProducts& products, cudaStream_t stream)
      : test_(test),
        products_(products),
        stream_(stream),
        rows_(test.num_rows()),
        E_(test.num_experts()),
        x_(rows_ * test.K * 2),
        w_(E_ * test.N * test.K * 2),
        grad_(rows_ * test.N * 2),
        out_(std::max(rows_ * std::max(test.N, test.K) * 2, E_ * test.N * test.K * 4)),
        hidden_(rows_ * test.N * 2),
        starts_((E_ + 1) * 8),
        counts_(E_ * 8) {
    x_.fill_bf16();
    w_.fill_bf16();
    grad_.fill_bf16();
    std::vector<int64_t> starts(1, 0);
    for (const int64_t count : test.counts) starts.push_back(starts.back() + count);
    starts_.fill(starts);
    counts_.fill(test.counts);
  }

  void print_all(bool& is_first) {
    print(is_first, "forward", [&] { forward(ops::ProductEpilogue::kNone); });
    print(is_first, "dx", [&] {
      products_.dx({.grad = rows(grad_, test_.N),
                    .w = weights(w_, DType::kBF16),
                    .segments = segments(),
                    .out = rows(out_, test_.K)},
                   {stream_});
    });
    print(is_first, "dw_bf16", [&] { dw(DType::kBF16); });
    print(is_first, "dw_fp32", [&] { dw(DType::kF32); });
    if (test_.layer != "up") return;
    print(is_first, "swiglu", [&] { forward(ops::ProductEpilogue::kSwiglu); });
    print(is_first, "swiglu_hidden", [&] { forward(ops::ProductEpilogue::kSwigluKeepHidden); });
  }

 private:
  TensorView rows(const DeviceMemory& memory, int64_t width) const {
    return {memory.data(), DType::kBF16, {rows_, width}, kGpu};
  }
  TensorView weights(const DeviceMemory& memory, DType dtype) const {
    return {memory.data(), dtype, {E_, test_.N, test_.K}, kGpu};
  }
  Segments segments() const {
    return {static_cast<const int64_t*>(starts_.data()),
            static_cast<const int64_t*>(counts_.data()), E_, kGpu};
  }

  void forward(ops::ProductEpilogue epilogue) {
    const bool keeps = epilogue == ops::ProductEpilogue::kSwigluKeepHidden;
    products_.forward(
        {.x = rows(x_, test_.K),
         .w = weights(w_, DType::kBF16),
         .segments = segments(),
         .out = rows(out_, epilogue == ops::ProductEpilogue::kNone ? test_.N : test_.N / 2),
         .hidden = keeps ? rows(hidden_, test_.N) : TensorView(),
         .epilogue = epilogue},
        {stream_});
  }
  void dw(DType dtype) {
    products_.dw({.grad = rows(grad_, test_.N),
                  .x = rows(x_, test_.K),
                  .segments = segments(),
                  .out = weights(out_, dtype)},
                 {stream_});
  }

  void print(bool& is_first, const char* operation, const std::function<void()>& launch) {
    const double ms = time_launch(stream_, launch);
    const double flops = 2.0 * static_cast<double>(rows_) * static_cast<double>(test_.N) *
                         static_cast<double>(test_.K);
    std::printf(
        "%s  {\"model\": \"%s\", \"layer\": \"%s\", \"load\": \"%s\", \"operation\": \"%s\", "
        "\"ms\": %.4f, \"tflops\": %.1f}",
        is_first ? "" : ",\n", test_.model.c_str(), test_.layer.c_str(), test_.load.c_str(),
        operation, ms, flops / ms / 1e9);
    is_first = false;
  }

  const ProductCase& test_;
  ops::GroupedProducts& products_;
  cudaStream_t stream_;
  int64_t rows_;
  int64_t E_;
  DeviceMemory x_;
  DeviceMemory w_;
  DeviceMemory grad_;
  DeviceMemory out_;
  DeviceMemory hidden_;
  DeviceMemory starts_;
  DeviceMemory counts_;
};

}  // namespace
}  // namespace crossdock::bench

int main() {
  using namespace crossdock::bench;
  try {
    cudaStream_t stream = nullptr;
    check_cuda_call(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    crossdock::ops::GroupedProducts products(kGpu);
    bool is_first = true;
    std::puts("[");
    for (const ProductCase& test : product_cases()) {
      CaseTimer(test, products, stream).print_all(is_first);
    }
    std::puts("\n]");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "product_times: %s\n", error.what());
    return 1;
  }
  return 0;
}
