#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ops/gemm.hpp"

namespace crossdock::ops {
namespace {

// Small whole numbers: every sum is exact.
std::vector<float> whole_numbers(int64_t count, int seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>((i * 7 + static_cast<size_t>(seed)) % 11) - 5.0F;
  }
  return values;
}

TEST(GroupedGemm, CoversEveryElementOfEveryProblemOnce) {
  struct Case {
    int64_t M, N, K;
  };
  const std::vector<Case> cases = {{5, 3, 2}, {0, 7, 4}, {300, 520, 9}, {4, 0, 3}, {17, 70, 0}};
  for (const int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<std::vector<float>> a;
    std::vector<std::vector<float>> b;
    std::vector<std::vector<float>> c;
    std::vector<GemmProblem> problems;
    for (const Case& size : cases) {
      a.push_back(whole_numbers(size.M * size.K, 1));
      b.push_back(whole_numbers(size.N * size.K, 2));
      c.emplace_back(static_cast<size_t>(size.M * size.N), std::nanf(""));
      problems.push_back({{a.back().data(), DType::kF32, size.K, 1},
                          {b.back().data(), DType::kF32, size.K, 1},
                          size.M,
                          size.N,
                          size.K});
    }
    grouped_gemm<float>(problems, pool, [&](const GemmTile<float>& tile) {
      const auto p = static_cast<size_t>(tile.problem);
      for (int64_t i = 0; i < tile.num_rows; ++i) {
        for (int64_t j = 0; j < tile.num_columns; ++j) {
          float& out = c[p][static_cast<size_t>((tile.row + i) * cases[p].N + tile.column + j)];
          EXPECT_TRUE(std::isnan(out));
          out = tile.values[i * tile.stride + j];
        }
      }
    });
    for (size_t p = 0; p < cases.size(); ++p) {
      const auto [M, N, K] = cases[p];
      for (int64_t i = 0; i < M; ++i) {
        for (int64_t j = 0; j < N; ++j) {
          float sum = 0;
          for (int64_t k = 0; k < K; ++k) {
            sum += a[p][static_cast<size_t>(i * K + k)] * b[p][static_cast<size_t>(j * K + k)];
          }
          ASSERT_EQ(sum, c[p][static_cast<size_t>(i * N + j)]) << p << ": " << i << "," << j;
        }
      }
    }
  }
}

}  // namespace
}  // namespace crossdock::ops
