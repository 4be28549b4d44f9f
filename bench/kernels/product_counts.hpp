#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace crossdock::bench {

/// Rows of each expert, as equal as possible.
inline std::vector<int64_t> balanced_counts(int64_t rows, int64_t E) {
  std::vector<int64_t> counts(static_cast<size_t>(E), rows / E);
  for (int64_t e = 0; e < rows % E; ++e) ++counts[static_cast<size_t>(e)];
  return counts;
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

}  // namespace crossdock::bench
