#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "bench/median.hpp"
#include "bench/result.hpp"

namespace crossdock::bench {

/// The value below which `part`, in [0, 1], of the values lie, interpolated between the two nearest
/// ones. REQUIRES: `sorted` is sorted and not empty.
inline double percentile(const std::vector<double>& sorted, double part) {
  const double place = part * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (place - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

/// A result with the name and the times of a step. REQUIRES: times_us is not empty.
inline StepResult summarize(std::string name, std::vector<double> times_us) {
  std::sort(times_us.begin(), times_us.end());
  return {.name = std::move(name),
          .median_us = median(times_us),
          .min_us = times_us.front(),
          .max_us = times_us.back(),
          .p10_us = percentile(times_us, 0.1),
          .p90_us = percentile(times_us, 0.9)};
}

}  // namespace crossdock::bench
