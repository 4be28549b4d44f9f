#pragma once

#include <cstdint>
#include <vector>

namespace crossdock::cli {

/// Small random changes of a computation's inputs. How far they move its result shows how far
/// rounding may, even where large terms cancel and the result itself says nothing of their size.
struct InputNoise {
  static constexpr uint64_t kSamples = 8;

  double relative = 0;  // deviation of the factor
  double absolute = 0;  // deviation of the summand
  uint64_t sample = 0;  // each has its own random numbers

  /// `stream` tells one array of a sample from another.
  void shake(std::vector<double>& values, uint64_t stream) const;
};

/// Raises each entry of `spread` to what `moved` differs by from `wanted`; what is not finite does
/// not count.
void widen_spread(const std::vector<double>& wanted, const std::vector<double>& moved,
                  std::vector<double>& spread);

}  // namespace crossdock::cli
