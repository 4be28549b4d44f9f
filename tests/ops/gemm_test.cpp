#include "ops/gemm.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

namespace crossdock::ops {
namespace {

struct Sizes {
  int64_t M, N, K;
};

const Sizes kSizes[] = {{1, 1, 1},     {1, 33, 7},    {14, 32, 256}, {15, 31, 257}, {3, 70, 0},
                        {29, 65, 600}, {257, 40, 19}, {20, 257, 16}, {6, 16, 512}};

template <typename Scalar>
std::vector<Scalar> random_values(int64_t count, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<Scalar> values(static_cast<size_t>(count));
  for (Scalar& value : values) {
    if constexpr (sizeof(Scalar) == 2) {
      value = from_float<Scalar>(static_cast<float>(normal(generator)));
    } else {
      value = static_cast<Scalar>(normal(generator));
    }
  }
  return values;
}

double wide(double value) {
  return value;
}
template <typename Source>
float wide(Source value) {
  return to_float(value);
}

// The definition in gemm.hpp, word for word.
template <typename T, typename A, typename B>
T defined_sum(const A* a, int64_t a_step, const B* b, int64_t b_step, int64_t K) {
  T total = 0;
  for (int64_t begin = 0; begin < K; begin += kGemmBlockK) {
    T sum = 0;
    for (int64_t k = begin; k < std::min(K, begin + kGemmBlockK); ++k) {
      sum = std::fma(static_cast<T>(wide(a[k * a_step])), static_cast<T>(wide(b[k * b_step])), sum);
    }
    total = begin == 0 ? sum : total + sum;
  }
  return total;
}

template <typename T>
void run_kernel(const GemmKernel& kernel, const GemmArgs<T>& args) {
  const auto scratch = std::make_unique<GemmScratch<T>>();
  if constexpr (sizeof(T) == 8) {
    kernel.run_f64(args, *scratch);
  } else {
    kernel.run_f32(args, *scratch);
  }
}

template <typename T, typename A, typename B>
void expect_defined_bits(const GemmKernel& kernel, const Sizes& size, bool a_by_k, bool b_by_k) {
  const auto [M, N, K] = size;
  const std::vector<A> a = random_values<A>(M * K, 1);
  const std::vector<B> b = random_values<B>(N * K, 2);
  const int64_t stride = (N + kGemmColumnMultiple - 1) / kGemmColumnMultiple * kGemmColumnMultiple;
  std::vector<T> c(static_cast<size_t>(M * stride), std::nan(""));
  const GemmOperand a_operand{a.data(), DTypeOf<A>::value, a_by_k ? K : 1, a_by_k ? 1 : M};
  const GemmOperand b_operand{b.data(), DTypeOf<B>::value, b_by_k ? K : 1, b_by_k ? 1 : N};
  run_kernel<T>(kernel, {a_operand, b_operand, c.data(), stride, M, N, K});
  for (int64_t i = 0; i < M; ++i) {
    for (int64_t j = 0; j < N; ++j) {
      const T wanted = defined_sum<T>(a.data() + i * a_operand.row_stride, a_operand.k_stride,
                                      b.data() + j * b_operand.row_stride, b_operand.k_stride, K);
      ASSERT_EQ(wanted, c[static_cast<size_t>(i * stride + j)])
          << kernel.name << " M=" << M << " N=" << N << " K=" << K << " i=" << i << " j=" << j;
    }
  }
}

TEST(Gemm, EveryKernelGivesTheDefinedBitsInEveryOrientation) {
  for (const GemmKernel& kernel : gemm_kernels()) {
    for (const Sizes& size : kSizes) {
      for (const bool a_by_k : {true, false}) {
        for (const bool b_by_k : {true, false}) {
          expect_defined_bits<float, float, float>(kernel, size, a_by_k, b_by_k);
          expect_defined_bits<double, double, double>(kernel, size, a_by_k, b_by_k);
          expect_defined_bits<float, BF16, BF16>(kernel, size, a_by_k, b_by_k);
          expect_defined_bits<float, F16, F16>(kernel, size, a_by_k, b_by_k);
          expect_defined_bits<float, float, BF16>(kernel, size, a_by_k, b_by_k);
        }
      }
    }
  }
}

TEST(Gemm, ARowDoesNotDependOnItsNeighbours) {
  const int64_t N = 40;
  const int64_t K = 300;
  const auto a = random_values<float>(64 * K, 3);
  const auto b = random_values<float>(N * K, 4);
  const int64_t stride = 64;
  std::vector<float> all(64 * stride);
  gemm(
      {{a.data(), DType::kF32, K, 1}, {b.data(), DType::kF32, K, 1}, all.data(), stride, 64, N, K});
  for (const int64_t row : {0, 13, 14, 31, 63}) {
    for (int64_t M = 1; M + row <= 64; M += 9) {
      std::vector<float> part(static_cast<size_t>(M * stride));
      gemm({{a.data() + row * K, DType::kF32, K, 1},
            {b.data(), DType::kF32, K, 1},
            part.data(),
            stride,
            M,
            N,
            K});
      for (int64_t j = 0; j < N; ++j) {
        ASSERT_EQ(all[static_cast<size_t>(row * stride + j)], part[static_cast<size_t>(j)]);
      }
    }
  }
}

TEST(Gemm, ANotANumberStaysInItsRow) {
  const int64_t K = 20;
  auto a = random_values<float>(5 * K, 5);
  const auto b = random_values<float>(8 * K, 6);
  a[2 * K + 3] = std::nanf("");
  std::vector<float> c(5 * 32);
  gemm({{a.data(), DType::kF32, K, 1}, {b.data(), DType::kF32, K, 1}, c.data(), 32, 5, 8, K});
  for (size_t i = 0; i < 5; ++i) {
    for (size_t j = 0; j < 8; ++j) EXPECT_EQ(std::isnan(c[i * 32 + j]), i == 2) << i << "," << j;
  }
}

TEST(Gemm, ThePortableKernelComesLast) {
  EXPECT_EQ(gemm_kernels().back().name, "portable");
}

}  // namespace
}  // namespace crossdock::ops
