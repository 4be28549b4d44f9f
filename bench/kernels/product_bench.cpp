// The experts' products alone: those of W1 ("up", [2F, D]) and of W2 ("down", [D, F]).
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "bench/cuda_bench.hpp"
#include "bench/cuda_steps.hpp"
#include "bench/kernels/product_counts.hpp"
#include "crossdock/error.hpp"
#include "crossdock/threads.hpp"
#include "ops/cuda/grouped_product.hpp"

namespace crossdock::bench {
namespace {

constexpr Device kGpu{.kind = DeviceKind::kCuda, .index = 0};
constexpr int64_t kSamples = 16;  // of each product that are checked

/// The products of one matrix: x [R, K] times w [E, N, K], and their gradients.
class ProductSteps {
 public:
  ProductSteps(const Scenario& s, std::string name, int64_t N, int64_t K, cudaStream_t stream)
      : name_(std::move(name)),
        counts_(s.skewed ? skewed_counts(s.tokens * s.top_k, s.experts)
                         : balanced_counts(s.tokens * s.top_k, s.experts)),
        R_(s.tokens * s.top_k),
        E_(s.experts),
        N_(N),
        K_(K),
        stream_(stream),
        products_(kGpu, s.max_sms),
        x_(random_tensor({R_, K}, stream)),
        w_(random_tensor({E_, N, K}, stream)),
        grad_(random_tensor({R_, N}, stream)),
        rows_out_(device_tensor(DType::kBF16, {R_, std::max(N, K)}, stream)),
        hidden_(device_tensor(DType::kBF16, {R_, N}, stream)),
        dw_out_(device_tensor(DType::kF32, {E_, N, K}, stream)) {
    starts_host_.push_back(0);
    for (const int64_t count : counts_) starts_host_.push_back(starts_host_.back() + count);
    starts_device_ = to_device({starts_host_.data(), {E_ + 1}}, stream);
    counts_device_ = to_device({counts_.data(), {E_}}, stream);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  std::vector<Step> steps(bool is_up, bool check) {
    using Epilogue = ops::ProductEpilogue;
    std::vector<Step> steps = {
        step(
            "forward", w_bytes(2) + row_bytes(N_ + K_), [this] { forward(Epilogue::kNone); },
            [this] { check_rows(rows(rows_out_, N_), N_, &ProductSteps::forward_value); }),
        step(
            "dx", w_bytes(2) + row_bytes(N_ + K_), [this] { dx(); },
            [this] { check_rows(rows(rows_out_, K_), K_, &ProductSteps::dx_value); }),
        step(
            "dw_bf16", w_bytes(2) + row_bytes(N_ + K_), [this] { dw(DType::kBF16); },
            [this] { check_dw(DType::kBF16); }),
        step(
            "dw_fp32", w_bytes(4) + row_bytes(N_ + K_), [this] { dw(DType::kF32); },
            [this] { check_dw(DType::kF32); })};
    if (is_up) {
      const auto check_swiglu = [this] {
        check_rows(rows(rows_out_, N_ / 2), N_ / 2, &ProductSteps::swiglu_value);
      };
      steps.push_back(step(
          "swiglu", w_bytes(2) + row_bytes(K_ + N_ / 2), [this] { forward(Epilogue::kSwiglu); },
          check_swiglu));
      steps.push_back(step(
          "swiglu_hidden", w_bytes(2) + row_bytes(K_ + N_ + N_ / 2),
          [this] { forward(Epilogue::kSwigluKeepHidden); }, check_swiglu));
    }
    if (!check) {
      for (Step& one : steps) one.settle = nullptr;
    }
    return steps;
  }

 private:
  Step step(const char* operation, int64_t bytes, std::function<void()> run,
            std::function<void()> check) const {
    return {.name = name_ + "_" + operation,
            .bytes = bytes,
            .flops = 2.0 * static_cast<double>(R_ * N_) * static_cast<double>(K_),
            .run = std::move(run),
            .settle = std::move(check)};
  }
  int64_t w_bytes(int64_t element_bytes) const { return E_ * N_ * K_ * element_bytes; }
  int64_t row_bytes(int64_t width) const { return R_ * width * size_of(DType::kBF16); }

  TensorView rows(const OwnedTensor& memory, int64_t width) const {
    return {memory.view.data, DType::kBF16, {R_, width}, kGpu};
  }
  TensorView dw_out(DType dtype) const { return {dw_out_.view.data, dtype, {E_, N_, K_}, kGpu}; }
  Segments segments() const {
    return {static_cast<const int64_t*>(starts_device_.view.data),
            static_cast<const int64_t*>(counts_device_.view.data), E_, kGpu};
  }

  void forward(ops::ProductEpilogue epilogue) {
    using Epilogue = ops::ProductEpilogue;
    products_.forward(
        {.x = rows(x_, K_),
         .w = w_.view,
         .segments = segments(),
         .out = rows(rows_out_, epilogue == Epilogue::kNone ? N_ : N_ / 2),
         .hidden = epilogue == Epilogue::kSwigluKeepHidden ? rows(hidden_, N_) : TensorView(),
         .epilogue = epilogue},
        {stream_});
  }
  void dx() {
    products_.dx(
        {.grad = rows(grad_, N_), .w = w_.view, .segments = segments(), .out = rows(rows_out_, K_)},
        {stream_});
  }
  void dw(DType dtype) {
    products_.dw(
        {.grad = rows(grad_, N_), .x = rows(x_, K_), .segments = segments(), .out = dw_out(dtype)},
        {stream_});
  }

  // Element i of every random tensor.
  static double random(int64_t i) {
    const std::vector<float>& block = random_values();
    return block[static_cast<size_t>(i) % block.size()];
  }
  int64_t expert_of(int64_t row) const {
    return std::ranges::upper_bound(starts_host_, row) - starts_host_.begin() - 1;
  }

  // A value that a product must have, and the sum of the magnitudes of its terms.
  struct Wanted {
    double value = 0.0;
    double magnitude = 0.0;
    void add(double a, double b) {
      value += a * b;
      magnitude += std::abs(a * b);
    }
  };
  Wanted forward_value(int64_t r, int64_t n) const {
    Wanted sum;
    for (int64_t k = 0; k < K_; ++k) {
      sum.add(random(r * K_ + k), random((expert_of(r) * N_ + n) * K_ + k));
    }
    return sum;
  }
  Wanted dx_value(int64_t r, int64_t k) const {
    Wanted sum;
    for (int64_t n = 0; n < N_; ++n) {
      sum.add(random(r * N_ + n), random((expert_of(r) * N_ + n) * K_ + k));
    }
    return sum;
  }
  Wanted swiglu_value(int64_t r, int64_t f) const {
    const Wanted gate = forward_value(r, f);
    const Wanted linear = forward_value(r, N_ / 2 + f);
    const double silu = gate.value / (1.0 + std::exp(-gate.value));
    return {.value = silu * linear.value,
            .magnitude = std::abs(silu * linear.value) + std::abs(gate.value) +
                         std::abs(linear.value) + 1.0};
  }
  Wanted dw_value(int64_t e, int64_t n, int64_t k) const {
    Wanted sum;
    for (int64_t r = starts_host_[static_cast<size_t>(e)];
         r < starts_host_[static_cast<size_t>(e + 1)]; ++r) {
      sum.add(random(r * N_ + n), random(r * K_ + k));
    }
    return sum;
  }

  // fp32 sums; results are rounded to bf16 once.
  void compare(double got, const Wanted& wanted, const std::string& where) const {
    if (std::abs(got - wanted.value) <= 0.01 * std::abs(wanted.value) + 1e-4 * wanted.magnitude) {
      return;
    }
    throw Error(ErrorCode::kInternal, "product " + name_ + " is wrong in " + where + ": " +
                                          std::to_string(got) + " instead of " +
                                          std::to_string(wanted.value));
  }

  void check_rows(const TensorView& out, int64_t width,
                  Wanted (ProductSteps::*wanted)(int64_t, int64_t) const) const {
    for (int64_t i = 0; i < kSamples; ++i) {
      const int64_t r = i * (R_ - 1) / (kSamples - 1);
      const int64_t column = (i * 977 + 5) % width;
      compare(read(out, r * width + column), (this->*wanted)(r, column),
              "row " + std::to_string(r) + ", column " + std::to_string(column));
    }
  }
  void check_dw(DType dtype) const {
    const TensorView out = dw_out(dtype);
    for (int64_t i = 0; i < kSamples; ++i) {
      const int64_t e = i % E_;
      const int64_t n = (i * 977 + 5) % N_;
      const int64_t k = (i * 331 + 7) % K_;
      compare(read(out, (e * N_ + n) * K_ + k), dw_value(e, n, k),
              "the gradient of expert " + std::to_string(e) + ", row " + std::to_string(n) +
                  ", column " + std::to_string(k));
    }
  }

  double read(const TensorView& tensor, int64_t index) const {
    const auto size = static_cast<size_t>(size_of(tensor.dtype));
    const auto* from =
        static_cast<const std::byte*>(tensor.data) + static_cast<size_t>(index) * size;
    float fp32 = 0.0f;
    BF16 bf16{};
    void* to = tensor.dtype == DType::kF32 ? static_cast<void*>(&fp32) : &bf16;
    check_cuda(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return tensor.dtype == DType::kF32 ? fp32 : to_float(bf16);
  }

  std::string name_;
  std::vector<int64_t> counts_;       // [E]
  std::vector<int64_t> starts_host_;  // [E + 1]
  int64_t R_, E_, N_, K_;
  cudaStream_t stream_;
  ops::GroupedProducts products_;
  OwnedTensor x_, w_, grad_;
  OwnedTensor rows_out_, hidden_, dw_out_;
  OwnedTensor starts_device_, counts_device_;
};

}  // namespace

std::vector<StepResult> run_cuda_products(const Scenario& s, const Repeats& repeats, bool check) {
  require_gpu(s);
  CudaStepTimer timer(repeats);
  std::vector<StepResult> results;
  run_ranks(1, [&](Group& group) {
    const auto time = [&](const std::string& name, int64_t N, int64_t K, bool is_up) {
      ProductSteps products(s, name, N, K, timer.stream());
      for (const Step& step : products.steps(is_up, check)) {
        results.push_back(timer.time(group, step));
      }
    };
    time("up", 2 * s.inner, s.width, true);
    time("down", s.width, s.inner, false);
  });
  return results;
}

}  // namespace crossdock::bench
