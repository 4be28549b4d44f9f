#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace crossdock::bench {

/// The mean of the two middle values if their number is even. REQUIRES: values is not empty.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

}  // namespace crossdock::bench
