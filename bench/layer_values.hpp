#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "bench/scenario.hpp"

namespace crossdock::bench {

/// Uniform in [-scale, scale), a function of the index, identical on every rank.
inline std::vector<float> layer_values(int64_t count, uint32_t place, double scale) {
  std::vector<float> result(static_cast<size_t>(count));
  uint32_t state = place * 2654435761U + 1;
  for (float& value : result) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(scale * (static_cast<double>(state >> 8) * 0x1p-23 - 1.0));
  }
  return result;
}

/// The tokens and parameters of a layer; every tensor and expert has different values.
inline std::vector<float> values_of_gate(const Scenario& s) {
  return layer_values(s.experts * s.width, 1, 1.0 / std::sqrt(static_cast<double>(s.width)));
}
inline std::vector<float> values_of_x(const Scenario& s, int rank) {
  return layer_values(s.tokens * s.width, 1000 + static_cast<uint32_t>(rank), 1.0);
}
inline std::vector<float> values_of_grad_out(const Scenario& s, int rank) {
  return layer_values(s.tokens * s.width, 2000 + static_cast<uint32_t>(rank), 1.0);
}
inline std::vector<float> values_of_w1(const Scenario& s, int64_t expert) {
  return layer_values(2 * s.inner * s.width, 3000 + static_cast<uint32_t>(expert),
                      1.0 / std::sqrt(static_cast<double>(s.width)));
}
inline std::vector<float> values_of_w2(const Scenario& s, int64_t expert) {
  return layer_values(s.width * s.inner, 900000 + static_cast<uint32_t>(expert),
                      1.0 / std::sqrt(static_cast<double>(s.inner)));
}

}  // namespace crossdock::bench
