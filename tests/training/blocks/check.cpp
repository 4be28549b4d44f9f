#include "check.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

namespace train {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// max |a - b| / max |b|; infinite if a value is not finite.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return kInfinity;
  double difference = 0.0;
  double largest = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double here = std::abs(a[i] - b[i]);
    if (!std::isfinite(here)) return kInfinity;
    difference = std::max(difference, here);
    largest = std::max(largest, std::abs(b[i]));
  }
  if (difference == 0.0) return 0.0;
  return largest > 0.0 ? difference / largest : kInfinity;
}

}  // namespace

Difference compare(const TrainResult& result, const TrainResult& wanted) {
  Difference difference;
  if (result.steps.size() != wanted.steps.size()) difference.losses = kInfinity;
  for (size_t i = 0; i < std::min(result.steps.size(), wanted.steps.size()); ++i) {
    const StepReport& a = result.steps[i];
    const StepReport& b = wanted.steps[i];
    const double losses = std::max({relative_difference({a.text_loss}, {b.text_loss}),
                                    relative_difference({a.router_loss}, {b.router_loss}),
                                    relative_difference({a.grad_norm}, {b.grad_norm})});
    if (i == 0) difference.first_loss = losses;
    difference.losses = std::max(difference.losses, losses);
  }
  for (const auto& [name, values] : wanted.first_gradients) {
    const auto found = result.first_gradients.find(name);
    const double here = found == result.first_gradients.end()
                            ? kInfinity
                            : relative_difference(found->second, values);
    if (here < difference.gradients) continue;
    difference.gradients = here;
    difference.worst_gradient = name;
  }
  return difference;
}

bool is_small(const Difference& difference, crossdock::DType dtype) {
  const bool is_fp64 = dtype == crossdock::DType::kF64;
  const double at_first = is_fp64 ? 1e-9 : 1e-4;
  const double later = is_fp64 ? 1e-7 : 1e-4;
  return difference.first_loss <= at_first && difference.gradients <= at_first &&
         difference.losses <= later;
}

std::string describe(const Difference& difference) {
  std::array<char, 200> text{};
  std::snprintf(text.data(), text.size(), "losses within %.1e, gradients within %.1e (%s)",
                difference.losses, difference.gradients, difference.worst_gradient.c_str());
  return text.data();
}

}  // namespace train
