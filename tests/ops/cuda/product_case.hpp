#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/tensor_memory.hpp"
#include "crossdock/thread_pool.hpp"
#include "dispatch/cuda/tensors.hpp"
#include "ops/cuda/grouped_product.hpp"
#include "ops/gemm.hpp"

namespace crossdock::ops {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr Device kGpu{.kind = DeviceKind::kCuda, .index = 0};

/// Values in the memory layout of a dtype: bf16, fp16 or fp32.
inline std::vector<std::byte> encode(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[4 * i], &values[i], 4);
    } else {
      const uint16_t bits =
          dtype == DType::kBF16 ? to_bf16(values[i]).bits : to_f16(values[i]).bits;
      std::memcpy(&bytes[2 * i], &bits, 2);
    }
  }
  return bytes;
}

inline std::vector<float> decode(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&values[i], &bytes[4 * i], 4);
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, &bytes[2 * i], 2);
      values[i] = dtype == DType::kBF16 ? to_float(BF16{bits}) : to_float(F16{bits});
    }
  }
  return values;
}

inline std::vector<float> rounded(const std::vector<float>& values, DType dtype) {
  return decode(encode(values, dtype), dtype);
}

struct ProductShape {
  std::vector<int64_t> counts;  // rows of each expert
  int64_t N = 0;
  int64_t K = 0;
  DType dtype = DType::kBF16;
  int64_t alignment = 1;  // of segments
  int64_t tail_rows = 0;  // unused rows after the last segment
  /// -1, 0 and 1: sums are exact, so results have defined bits. Otherwise random reals.
  bool whole_numbers = true;
};

/// Operands of grouped products in host memory, and the products as the CPU computes them. Rows
/// that belong to no expert are NaN.
class ProductCase {
 public:
  explicit ProductCase(ProductShape shape, unsigned seed = 1) : shape_(std::move(shape)) {
    for (const int64_t count : shape_.counts) {
      const int64_t alignment = shape_.alignment;
      starts.push_back(starts.back() + (count + alignment - 1) / alignment * alignment);
    }
    R = starts.back() + shape_.tail_rows;
    std::mt19937 generator(seed);
    x = draw_rows(generator, shape_.K);
    grad = draw_rows(generator, shape_.N);
    w = draw(generator, num_experts() * shape_.N * shape_.K);
    bias = draw(generator, num_experts() * shape_.N);
  }

  const ProductShape& shape() const { return shape_; }
  int64_t num_experts() const { return static_cast<int64_t>(shape_.counts.size()); }

  // Unrounded; 0 in rows that belong to no expert.

  std::vector<float> forward(bool with_bias) const {
    const int64_t N = shape_.N;
    const int64_t K = shape_.K;
    return multiply(R * N, [&](int64_t e, int64_t start, int64_t count) {
      return Part{{operand(x, start * K, K, 1), operand(w, e * N * K, K, 1), count, N, K},
                  start * N,
                  with_bias ? &bias[static_cast<size_t>(e * N)] : nullptr};
    });
  }
  std::vector<float> dx() const {
    const int64_t N = shape_.N;
    const int64_t K = shape_.K;
    return multiply(R * K, [&](int64_t e, int64_t start, int64_t count) {
      return Part{{operand(grad, start * N, N, 1), operand(w, e * N * K, 1, K), count, K, N},
                  start * K,
                  nullptr};
    });
  }
  std::vector<float> dw() const {
    const int64_t N = shape_.N;
    const int64_t K = shape_.K;
    return multiply(num_experts() * N * K, [&](int64_t e, int64_t start, int64_t count) {
      return Part{{operand(grad, start * N, 1, N), operand(x, start * K, 1, K), N, K, count},
                  e * N * K,
                  nullptr};
    });
  }

  std::vector<int64_t> starts = {0};  // [E + 1]
  int64_t R = 0;
  std::vector<float> x;     // [R, K], representable in the dtype, like the others
  std::vector<float> grad;  // [R, N]
  std::vector<float> w;     // [E, N, K]
  std::vector<float> bias;  // [E, N]

 private:
  struct Part {
    GemmProblem problem;
    int64_t offset;     // of its result
    const float* bias;  // of its columns, or null
  };

  static GemmOperand operand(const std::vector<float>& values, int64_t offset, int64_t row_stride,
                             int64_t k_stride) {
    return {values.data() + offset, DType::kF32, row_stride, k_stride};
  }

  template <typename PartOf>
  std::vector<float> multiply(int64_t size, const PartOf& part_of) const {
    std::vector<float> result(static_cast<size_t>(size), 0.0F);
    std::vector<Part> parts;
    std::vector<GemmProblem> problems;
    for (int64_t e = 0; e < num_experts(); ++e) {
      const auto i = static_cast<size_t>(e);
      parts.push_back(part_of(e, starts[i], shape_.counts[i]));
      problems.push_back(parts.back().problem);
    }
    grouped_gemm<float>(problems, *ThreadPool::process_wide(), [&](const GemmTile<float>& tile) {
      const Part& part = parts[static_cast<size_t>(tile.problem)];
      for (int64_t i = 0; i < tile.num_rows; ++i) {
        for (int64_t j = 0; j < tile.num_columns; ++j) {
          const int64_t column = tile.column + j;
          const int64_t at = part.offset + (tile.row + i) * part.problem.N + column;
          const float bias_value = part.bias != nullptr ? part.bias[column] : 0.0F;
          result[static_cast<size_t>(at)] = tile.values[i * tile.stride + j] + bias_value;
        }
      }
    });
    return result;
  }

  std::vector<float> draw(std::mt19937& generator, int64_t count) const {
    std::uniform_int_distribution<int> whole(-1, 1);
    std::uniform_real_distribution<float> real(-1.0F, 1.0F);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = shape_.whole_numbers ? static_cast<float>(whole(generator)) : real(generator);
    }
    return rounded(values, shape_.dtype);
  }
  std::vector<float> draw_rows(std::mt19937& generator, int64_t width) const {
    std::vector<float> rows = draw(generator, R * width);
    for (int64_t e = 0, next = 0; e <= num_experts(); ++e) {
      const auto i = static_cast<size_t>(e);
      const int64_t begin = e < num_experts() ? starts[i] : R;
      std::fill(rows.begin() + next * width, rows.begin() + begin * width, kNaN);
      if (e < num_experts()) next = begin + shape_.counts[i];
    }
    return rows;
  }

  ProductShape shape_;
};

/// The operands of a case on GPU 0, with products of one kind of kernels.
class DeviceProducts {
 public:
  explicit DeviceProducts(const ProductCase& test, ProductKernels kernels, int max_sms = 0)
      : products(kGpu, max_sms, kernels), test_(test), dtype_(test.shape().dtype) {
    x = upload(test.x, {test.R, test.shape().K});
    grad = upload(test.grad, {test.R, test.shape().N});
    w = upload(test.w, {test.num_experts(), test.shape().N, test.shape().K});
    bias = upload(test.bias, {test.num_experts(), test.shape().N});
    starts = to_device(ConstTensorView(test.starts.data(), {test.num_experts() + 1}), stream);
    counts = to_device(ConstTensorView(test.shape().counts.data(), {test.num_experts()}), stream);
    stream.synchronize();
  }

  Segments segments() const {
    return {static_cast<const int64_t*>(starts.view.data),
            static_cast<const int64_t*>(counts.view.data), test_.num_experts(), kGpu};
  }

  ProductForwardArgs forward_args() const {
    return {.x = x.view, .w = w.view, .segments = segments()};
  }

  OwnedTensor make(DType dtype, const Shape& shape) const {
    return device_tensor(dtype, shape, stream);
  }
  std::vector<float> download(const OwnedTensor& tensor) const {
    return decode(to_host(tensor.view, stream), tensor.view.dtype);
  }

  std::vector<float> forward(DType result, bool with_bias = false) {
    const OwnedTensor out = make(result, {test_.R, test_.shape().N});
    ProductForwardArgs args = forward_args();
    if (with_bias) args.bias = bias.view;
    args.out = out.view;
    products.forward(args, stream.view());
    return download(out);
  }
  std::vector<float> dx(DType result) {
    const OwnedTensor out = make(result, {test_.R, test_.shape().K});
    products.dx({.grad = grad.view, .w = w.view, .segments = segments(), .out = out.view},
                stream.view());
    return download(out);
  }
  std::vector<float> dw(DType result) {
    const OwnedTensor out = make(result, w.view.shape);
    run_dw(out, false);
    return download(out);
  }
  /// Adds to `initial`.
  std::vector<float> dw(const std::vector<float>& initial) {
    const OwnedTensor out = to_device(ConstTensorView(initial.data(), w.view.shape), stream);
    run_dw(out, true);
    return download(out);
  }

  RankStream stream;
  GroupedProducts products;
  OwnedTensor x;
  OwnedTensor grad;
  OwnedTensor w;
  OwnedTensor bias;
  OwnedTensor starts;
  OwnedTensor counts;

 private:
  OwnedTensor upload(const std::vector<float>& values, const Shape& shape) const {
    const std::vector<std::byte> bytes = encode(values, dtype_);
    OwnedTensor copy = to_device(ConstTensorView(bytes.data(), dtype_, shape), stream);
    stream.synchronize();  // the bytes are freed on return
    return copy;
  }
  void run_dw(const OwnedTensor& out, bool accumulate) {
    products.dw({.grad = grad.view,
                 .x = x.view,
                 .segments = segments(),
                 .out = out.view,
                 .accumulate = accumulate},
                stream.view());
  }

  const ProductCase& test_;
  DType dtype_;
};

/// Equal, or both NaN.
inline void expect_same(const char* name, const std::vector<float>& got,
                        const std::vector<float>& wanted) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool is_same = got[i] == wanted[i] || (std::isnan(got[i]) && std::isnan(wanted[i]));
    ASSERT_TRUE(is_same) << name << " at " << i << ": got " << got[i] << ", wanted " << wanted[i];
  }
}

/// Within `relative` of the largest value.
inline void expect_close(const char* name, const std::vector<float>& got,
                         const std::vector<float>& wanted, float relative) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  float largest = 0.0F;
  for (const float value : wanted) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - wanted[i]), relative * largest)
        << name << " at " << i << ": got " << got[i] << ", wanted " << wanted[i];
  }
}

/// The rows of the worked example: ragged, with experts that have none.
inline std::vector<int64_t> ragged_counts() {
  return {162, 0, 2577, 446, 0, 83};
}

/// Between 0 and 2 * mean rows for each of E experts; some have none.
inline std::vector<int64_t> random_counts(int64_t E, int64_t mean, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int64_t> rows(0, 2 * mean);
  std::vector<int64_t> counts(static_cast<size_t>(E));
  for (int64_t& count : counts) count = generator() % 5 == 0 ? 0 : rows(generator);
  return counts;
}

}  // namespace crossdock::ops
