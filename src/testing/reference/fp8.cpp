#include <algorithm>
#include <cmath>
#include <limits>

#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

constexpr double kLargest = 448.0;

struct Scaling {
  double scale;
  double factor;
};

Scaling scaling_of(double a, Fp8Scale kind) {
  if (a == 0.0) return {1.0, 1.0};
  if (kind == Fp8Scale::kExact) {
    a = std::max(a, kLargest * 0x1p-126);
    return {round_to(DType::kF32, a / kLargest),
            round_to(DType::kF32, round_to(DType::kF32, 1.0 / a) * kLargest)};
  }
  double scale = 0x1p-126;
  while (scale * kLargest < a) scale *= 2.0;
  return {scale, 1.0 / scale};
}

}  // namespace

double round_to_e4m3(double value) {
  if (std::isnan(value)) return value;
  const double size = std::abs(value);
  if (size >= kLargest) return std::copysign(kLargest, value);
  double spacing = 0x1p-9;  // of the denormals and the smallest normal numbers
  while (size >= spacing * 16.0) spacing *= 2.0;
  return std::copysign(std::nearbyint(size / spacing) * spacing, value);
}

Fp8Rows quantise_rows(const std::vector<double>& x, const Fp8Format& format) {
  Fp8Rows rows{.values = x, .scales = {}};
  const int64_t D = format.width;
  const int64_t T = D == 0 ? 0 : static_cast<int64_t>(x.size()) / D;
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t first = 0; first < D; first += format.group) {
      double* const begin = rows.values.data() + t * D + first;
      double* const end = begin + std::min(format.group, D - first);
      double amax = 0.0;
      const bool is_finite = std::all_of(begin, end, [](double v) { return std::isfinite(v); });
      for (const double* v = begin; v != end; ++v) amax = std::max(amax, std::abs(*v));
      Scaling scaling = {std::numeric_limits<double>::quiet_NaN(), 1.0};
      if (is_finite) scaling = scaling_of(std::max(amax, format.amax_floor), format.scale);
      rows.scales.push_back(scaling.scale);
      for (double* v = begin; v != end; ++v) {
        *v = round_to_e4m3(round_to(DType::kF32, *v * scaling.factor));
      }
    }
  }
  return rows;
}

}  // namespace crossdock::reference
