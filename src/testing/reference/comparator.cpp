#include "crossdock/testing/comparator.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>
#include <sstream>

#include "crossdock/testing/reference.hpp"

namespace crossdock::reference {
namespace {

double scale_at(const Allowance& allowance, size_t entry) {
  return allowance.scale.size() == 1 ? allowance.scale[0] : allowance.scale[entry];
}

// Whether infinite partial sums can give this value: terms of one sign make an infinity of that
// sign, terms of both signs can also make a NaN. The scale is the sum of all magnitudes.
bool can_overflow(double got, double wanted, const Allowance& allowance, size_t entry) {
  const auto is_infinite = [&](double sum) {
    return std::isinf(round_to(allowance.dtype, sum * (1 + allowance.tolerance)));
  };
  const double scale = scale_at(allowance, entry);
  const bool up = is_infinite((scale + wanted) / 2);
  const bool down = is_infinite((scale - wanted) / 2);
  if (std::isnan(got)) return up && down;
  return std::isinf(got) && (got > 0 ? up : down);
}

}  // namespace

void Comparator::exact(const std::string& name, const std::vector<double>& got,
                       const std::vector<double>& wanted) {
  if (!same_size(name, got.size(), wanted.size())) return;
  const Comparison difference = compare(got, wanted);
  if (difference.num_different > 0) fail(name, difference.first, got, wanted);
}

void Comparator::exact(const std::string& name, const std::vector<int64_t>& got,
                       const std::vector<int64_t>& wanted) {
  exact(name, std::vector<double>(got.begin(), got.end()),
        std::vector<double>(wanted.begin(), wanted.end()));
}

void Comparator::near(const std::string& name, const std::vector<double>& got,
                      const std::vector<double>& wanted, const Allowance& allowance) {
  if (!same_size(name, got.size(), wanted.size())) return;
  std::vector<double> spread;
  for (size_t i = 0; i < got.size() && passed(); ++i) {
    const bool both_nan = std::isnan(got[i]) && std::isnan(wanted[i]);
    if (both_nan || got[i] == wanted[i]) continue;
    double allowed = allowance.tolerance * scale_at(allowance, i) + allowance.floor;
    const double outermost = wanted[i] + std::copysign(allowed, wanted[i]);
    if (std::isinf(got[i]) && got[i] == round_to(allowance.dtype, outermost)) continue;
    if (allowance.may_overflow && can_overflow(got[i], wanted[i], allowance, i)) continue;
    const double error = std::abs(got[i] - wanted[i]);
    if (!(error <= allowed) && std::isfinite(error) && allowance.spread) {
      if (spread.empty()) spread = allowance.spread();
      allowed = std::max(allowed, spread[i]);
    }
    if (!(error <= allowed)) return fail(name, static_cast<int64_t>(i), got, wanted);
    largest_part_ = std::max(largest_part_, error / allowed);
  }
}

bool Comparator::same_size(const std::string& name, size_t got, size_t wanted) {
  if (got == wanted) return true;
  if (passed()) {
    failure_ =
        name + " has " + std::to_string(got) + " values, must have " + std::to_string(wanted);
  }
  return false;
}

void Comparator::fail(const std::string& name, int64_t index, const std::vector<double>& got,
                      const std::vector<double>& wanted) {
  if (!passed()) return;
  std::ostringstream message;
  message.precision(17);
  message << name << ", value " << index << " is " << got[static_cast<size_t>(index)]
          << ", must be " << wanted[static_cast<size_t>(index)];
  failure_ = message.str();
}

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

}  // namespace crossdock::reference
