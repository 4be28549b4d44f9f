#pragma once

#include <cstdint>

namespace crossdock::ops {

/// <a, b> with defined bits: sum j = 0 to 15 adds the products i = j modulo 16, ascending in i; the
/// 16 sums are then added in pairs (0 with 8, 1 with 9, ...; then 0 with 4, ...; 0 with 2; 0 with
/// 1).
template <typename T>
T dot(const T* a, const T* b, int64_t count) {
  constexpr int64_t kLanes = 16;
  T sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) sums[lane] += a[i] * b[i];
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

}  // namespace crossdock::ops
