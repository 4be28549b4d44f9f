// quantise_rows and dequantise_rows, whose floor is the time of their bytes.
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "bench/cuda_bench.hpp"
#include "bench/cuda_steps.hpp"
#include "crossdock/error.hpp"
#include "crossdock/fp8.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::bench {
namespace {

constexpr int64_t kCheckedRows = 5;  // at the beginning, and as many at the end

// One step's rows [T, D]: `wide`, and the same in fp8.
struct Fp8Tensors {
  OwnedTensor wide;
  OwnedTensor values;
  OwnedTensor scales;

  int64_t num_bytes() const {
    return wide.view.num_bytes() + values.view.num_bytes() + scales.view.num_bytes();
  }
};

// Rows [first, first + count) of a tensor.
ConstTensorView rows_of(const ConstTensorView& tensor, int64_t first, int64_t count) {
  const auto* data = static_cast<const std::byte*>(tensor.data) + first * tensor.row_bytes();
  return {data, tensor.dtype, {count, tensor.shape[1]}, tensor.device};
}

class QuantiseSteps {
 public:
  QuantiseSteps(const Scenario& s, cudaStream_t stream)
      : T_(s.tokens), D_(s.width), stream_(stream), bf16_(random_tensor({T_, D_}, stream)) {}

  Step quantise(std::string name, const OwnedTensor& x, DType scale_dtype, Fp8Scale scale) const {
    const Fp8Tensors to = tensors(x, scale_dtype);
    return {.name = std::move(name),
            .bytes = to.num_bytes(),
            .run = [=, this] { quantise(to, scale, {stream_}); },
            .settle = [=, this] { check_quantised(to, scale); }};
  }

  // From the rows that quantise has made of `x`.
  Step dequantise(std::string name, DType dtype, DType scale_dtype) const {
    const Fp8Tensors from = tensors(bf16_, scale_dtype);
    quantise(from, Fp8Scale::kPow2, {stream_});
    Fp8Tensors to = from;
    to.wide = device_tensor(dtype, {T_, D_}, stream_);
    return {.name = std::move(name),
            .bytes = to.num_bytes(),
            .run = [=, this] { dequantise(to, {stream_}); },
            .settle = [=, this] { check_dequantised(to); }};
  }

  const OwnedTensor& bf16() const { return bf16_; }

  OwnedTensor fp32() const {
    Fp8Tensors to = tensors(bf16_, DType::kF32);
    quantise(to, Fp8Scale::kExact, {stream_});
    to.wide = device_tensor(DType::kF32, {T_, D_}, stream_);
    dequantise(to, {stream_});
    return to.wide;
  }

 private:
  Fp8Tensors tensors(const OwnedTensor& wide, DType scale_dtype) const {
    const int64_t group = fp8_group_size(scale_dtype);
    return {wide, device_tensor(DType::kF8E4M3, {T_, D_}, stream_),
            device_tensor(scale_dtype, {T_, (D_ + group - 1) / group}, stream_)};
  }

  static void quantise(const Fp8Tensors& t, Fp8Scale scale, Stream stream) {
    quantise_rows({.x = t.wide.view,
                   .values = t.values.view,
                   .scales = t.scales.view,
                   .scale = scale,
                   .stream = stream});
  }
  static void dequantise(const Fp8Tensors& t, Stream stream) {
    dequantise_rows(
        {.values = t.values.view, .scales = t.scales.view, .out = t.wide.view, .stream = stream});
  }

  // ---- Checks: some rows have the bits of the CPU ----

  // Calls check with the first and the last rows, in host memory.
  void for_some_rows(const Fp8Tensors& t,
                     const std::function<void(const Fp8Tensors&)>& check) const {
    const int64_t count = std::min(T_, kCheckedRows);
    for (const int64_t first : {int64_t{0}, T_ - count}) {
      check({to_host(rows_of(t.wide.view, first, count), count, stream_),
             to_host(rows_of(t.values.view, first, count), count, stream_),
             to_host(rows_of(t.scales.view, first, count), count, stream_)});
    }
  }
  static void compare(const TensorView& got, const TensorView& wanted, const char* what) {
    if (std::memcmp(got.data, wanted.data, static_cast<size_t>(got.num_bytes())) == 0) return;
    throw Error(ErrorCode::kInternal, std::string(what) + " differ from those of the CPU");
  }
  static Buffer like(const TensorView& tensor) { return Buffer(tensor.num_bytes()); }

  void check_quantised(const Fp8Tensors& t, Fp8Scale scale) const {
    for_some_rows(t, [&](const Fp8Tensors& got) {
      const Buffer values = like(got.values.view);
      const Buffer scales = like(got.scales.view);
      const TensorView values_view = values.view(DType::kF8E4M3, got.values.view.shape);
      const TensorView scales_view = scales.view(got.scales.view.dtype, got.scales.view.shape);
      quantise_rows(
          {.x = got.wide.view, .values = values_view, .scales = scales_view, .scale = scale});
      compare(got.values.view, values_view, "values");
      compare(got.scales.view, scales_view, "scales");
    });
  }
  void check_dequantised(const Fp8Tensors& t) const {
    for_some_rows(t, [&](const Fp8Tensors& got) {
      const Buffer out = like(got.wide.view);
      const TensorView out_view = out.view(got.wide.view.dtype, got.wide.view.shape);
      dequantise_rows({.values = got.values.view, .scales = got.scales.view, .out = out_view});
      compare(got.wide.view, out_view, "rows");
    });
  }

  int64_t T_, D_;
  cudaStream_t stream_;
  OwnedTensor bf16_;
};

}  // namespace

std::vector<StepResult> run_cuda_quantise(const Scenario& s, const Repeats& repeats, bool check) {
  require_gpu(s);
  CudaStepTimer timer(repeats);
  std::vector<StepResult> results;
  run_ranks(1, [&](Group& group) {
    const QuantiseSteps steps(s, timer.stream());
    const auto time = [&](Step step) {
      if (!check) step.settle = nullptr;
      results.push_back(timer.time(group, step));
    };
    time(steps.quantise("pow2_128", steps.bf16(), DType::kF32, Fp8Scale::kPow2));
    time(steps.quantise("exact_128", steps.bf16(), DType::kF32, Fp8Scale::kExact));
    time(steps.quantise("pow2_32", steps.bf16(), DType::kE8M0, Fp8Scale::kPow2));
    time(steps.quantise("pow2_128_fp32", steps.fp32(), DType::kF32, Fp8Scale::kPow2));
    time(steps.dequantise("back_128", DType::kBF16, DType::kF32));
    time(steps.dequantise("back_32", DType::kBF16, DType::kE8M0));
    time(steps.dequantise("back_128_fp32", DType::kF32, DType::kF32));
  });
  return results;
}

}  // namespace crossdock::bench
