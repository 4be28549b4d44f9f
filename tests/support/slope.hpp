#pragma once

namespace crossdock {

/// The derivative of `loss()` with respect to `value`, by central differences; restores `value`.
template <typename Loss>
double slope_of(double& value, double step, const Loss& loss) {
  const double kept = value;
  value = kept + step;
  const double above = loss();
  value = kept - step;
  const double below = loss();
  value = kept;
  return (above - below) / (2 * step);
}

}  // namespace crossdock
