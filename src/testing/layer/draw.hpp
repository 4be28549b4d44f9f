#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <vector>

#include "crossdock/testing/reference.hpp"

namespace crossdock::conformance {

/// Random numbers that are the same with every standard library.
class Draw {
 public:
  explicit Draw(uint64_t seed) : generator_(seed) {}

  uint64_t bits() { return generator_(); }
  /// In [first, last].
  int64_t between(int64_t first, int64_t last) {
    const auto count = static_cast<uint64_t>(last - first + 1);
    return first + static_cast<int64_t>(generator_() % count);
  }
  bool percent(int64_t chance) { return between(0, 99) < chance; }
  template <typename T>
  T pick(const std::vector<T>& values) {
    return values[static_cast<size_t>(between(0, std::ssize(values) - 1))];
  }
  /// In [-1, 1).
  double signed_unit() { return static_cast<double>(generator_() >> 11) * 0x1p-52 - 1.0; }
  /// Values with standard deviation `scale`, rounded to the dtype.
  std::vector<double> values(int64_t count, double scale, DType dtype) {
    std::vector<double> all(static_cast<size_t>(count));
    for (double& value : all) {
      value = reference::round_to(dtype, scale * std::numbers::sqrt3 * signed_unit());
    }
    return all;
  }

 private:
  std::mt19937_64 generator_;
};

}  // namespace crossdock::conformance
