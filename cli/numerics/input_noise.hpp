#pragma once

#include <cstdint>
#include <vector>

namespace crossdock::cli {

/// Small random changes of a computation's inputs. Their effect on the result shows the effect that
/// rounding may have, even where large terms cancel.
struct InputNoise {
  static constexpr uint64_t kSamples = 8;

  double relative = 0;  // standard deviation of a factor
  double absolute = 0;  // standard deviation of a summand
  uint64_t sample = 0;  // selects the random numbers

  /// `stream` identifies the array within a sample.
  void shake(std::vector<double>& values, uint64_t stream) const;
};

/// Raises each entry of `spread` to |moved - wanted| where that is larger and finite.
void widen_spread(const std::vector<double>& wanted, const std::vector<double>& moved,
                  std::vector<double>& spread);

}  // namespace crossdock::cli
