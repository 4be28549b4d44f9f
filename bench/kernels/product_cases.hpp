#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace crossdock::bench {

/// One grouped product of a model: rows of width K times weights [E, N, K].
struct ProductCase {
  std::string model;
  std::string layer;  // up (gate and linear), or down
  std::string load;   // balanced, or skewed with two empty experts
  int64_t K = 0;
  int64_t N = 0;
  std::vector<int64_t> counts;  // rows of each expert

  int64_t num_rows() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }
  int64_t num_experts() const { return static_cast<int64_t>(counts.size()); }
};

inline std::vector<int64_t> balanced_counts(int64_t rows, int64_t E) {
  return std::vector<int64_t>(static_cast<size_t>(E), rows / E);
}

/// Expert e has rows in proportion to 1 / (e + 2), except two that have none; the first one gets
/// the remainder. bench/compare_grouped.py computes the same.
inline std::vector<int64_t> skewed_counts(int64_t rows, int64_t E) {
  const auto is_empty = [&](int64_t e) { return e == 1 || e == E / 2; };
  double sum = 0.0;
  for (int64_t e = 0; e < E; ++e) sum += is_empty(e) ? 0.0 : 1.0 / static_cast<double>(e + 2);
  std::vector<int64_t> counts(static_cast<size_t>(E), 0);
  for (int64_t e = 0; e < E; ++e) {
    if (is_empty(e)) continue;
    const double share = 1.0 / static_cast<double>(e + 2) / sum;
    counts[static_cast<size_t>(e)] = static_cast<int64_t>(share * static_cast<double>(rows));
  }
  counts[0] += rows - std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return counts;
}

/// Layers like those of DeepSeek-V3 (A), Qwen3-30B-A3B (B) and gpt-oss-20b (C).
inline std::vector<ProductCase> product_cases() {
  struct Size {
    const char* model;
    const char* layer;
    int64_t K, N, E, rows;
  };
  std::vector<ProductCase> cases;
  for (const Size& size :
       {Size{"A", "up", 7168, 4096, 32, 32768}, Size{"A", "down", 2048, 7168, 32, 32768},
        Size{"B", "up", 2048, 1536, 16, 65536}, Size{"B", "down", 768, 2048, 16, 65536},
        Size{"C", "up", 2880, 5760, 8, 16384}, Size{"C", "down", 2880, 2880, 8, 16384}}) {
    cases.push_back(
        {size.model, size.layer, "balanced", size.K, size.N, balanced_counts(size.rows, size.E)});
    cases.push_back(
        {size.model, size.layer, "skewed", size.K, size.N, skewed_counts(size.rows, size.E)});
  }
  return cases;
}

}  // namespace crossdock::bench
