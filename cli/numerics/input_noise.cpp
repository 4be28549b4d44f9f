#include "cli/numerics/input_noise.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>

namespace crossdock::cli {

void InputNoise::shake(std::vector<double>& values, uint64_t stream) const {
  std::mt19937_64 random(stream * kSamples + sample);
  constexpr double kWidth =
      std::numbers::sqrt3;  // of a uniform distribution with standard deviation 1
  std::uniform_real_distribution<double> draw(-kWidth, kWidth);
  for (double& value : values) {
    value *= 1.0 + relative * draw(random);
    if (absolute > 0) value += absolute * draw(random);
  }
}

void widen_spread(const std::vector<double>& wanted, const std::vector<double>& moved,
                  std::vector<double>& spread) {
  spread.resize(wanted.size(), 0.0);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double difference = std::abs(moved[i] - wanted[i]);
    if (std::isfinite(difference)) spread[i] = std::max(spread[i], difference);
  }
}

}  // namespace crossdock::cli
