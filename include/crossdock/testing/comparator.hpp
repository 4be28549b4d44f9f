#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/error.hpp"

// Results against the reference, up to rounding.

namespace crossdock::reference {

/// Distance between neighbouring values near 1, for fp64, fp32, bf16 and fp16.
constexpr double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-52;
    case DType::kF32:
      return 0x1p-23;
    case DType::kF16:
      return 0x1p-10;
    default:
      return 0x1p-7;
  }
}

/// Smallest positive value, for the same dtypes.
constexpr double denormal_spacing_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-1074;
    case DType::kF32:
      return 0x1p-149;
    case DType::kF16:
      return 0x1p-24;
    default:
      return 0x1p-133;
  }
}

/// How far a result may differ from the reference.
struct Allowance {
  double tolerance = 0;         // times the scale
  std::vector<double> scale{};  // per entry, or one for all
  double floor = 0;             // rounding error of values too small for the dtype
  DType dtype = DType::kF32;    // of the result
  /// The result is a sum of partial sums in its dtype, which may have been infinite.
  bool may_overflow = false;
  /// (optional) Per entry, how far rounding may move the result; only called if the rest does not
  /// suffice.
  std::function<std::vector<double>()> spread{};
};

/// Compares results and keeps the first difference.
class CROSSDOCK_API Comparator {
 public:
  /// Bits must be equal.
  void exact(const std::string& name, const std::vector<double>& got,
             const std::vector<double>& wanted);
  void exact(const std::string& name, const std::vector<int64_t>& got,
             const std::vector<int64_t>& wanted);
  /// |got - wanted| must be allowed, per entry. Non-finite values must be equal; infinity is also
  /// accepted for values too large for the dtype.
  void near(const std::string& name, const std::vector<double>& got,
            const std::vector<double>& wanted, const Allowance& allowance);

  bool passed() const { return failure_.empty(); }
  const std::string& failure() const { return failure_; }
  /// The largest error, as a part of what was allowed.
  double largest_part() const { return largest_part_; }

 private:
  bool same_size(const std::string& name, size_t got, size_t wanted);
  void fail(const std::string& name, int64_t index, const std::vector<double>& got,
            const std::vector<double>& wanted);

  std::string failure_;
  double largest_part_ = 0.0;
};

/// Small random changes of a computation's inputs. Their effect on the result shows the effect that
/// rounding may have, even where large terms cancel.
struct CROSSDOCK_API InputNoise {
  static constexpr uint64_t kSamples = 8;

  double relative = 0;  // standard deviation of a factor
  double absolute = 0;  // standard deviation of a summand
  uint64_t sample = 0;  // selects the random numbers

  /// `stream` identifies the array within a sample.
  void shake(std::vector<double>& values, uint64_t stream) const;
};

/// Raises each entry of `spread` to |moved - wanted| where that is larger and finite.
CROSSDOCK_API void widen_spread(const std::vector<double>& wanted, const std::vector<double>& moved,
                                std::vector<double>& spread);

}  // namespace crossdock::reference
