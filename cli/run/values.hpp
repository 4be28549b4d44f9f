#pragma once

#include <cstdint>
#include <vector>

#include "cli/run/job.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cli {

/// The tensors of a run; each has its own random numbers.
enum class Source : uint64_t {
  kX = 1,
  kGradOut,
  kGate,
  kGateBias,
  kExpertBias,
  kW1,
  kW2,
  kB1,
  kB2,
  kSharedW1,
  kSharedW2,
  kSharedB1,
  kSharedB2
};

/// Uniform random numbers for the tensors of a job. A number depends on the seed, the tensor, the
/// index (global token, expert) and the place in its row alone: neither on the number of ranks nor
/// on the dtype, but for its rounding.
class RunValues {
 public:
  explicit RunValues(const RunJob& job);

  /// `rows` [n, ...]: row i is that of index first + i. Rounds to the tensor's dtype.
  void fill(Source source, int64_t first, TensorView rows) const;

  /// The same as doubles, rounded to the dtype.
  std::vector<double> row(Source source, int64_t index, int64_t width, DType dtype) const;

 private:
  double scale_of(Source source) const;

  uint64_t seed_;
  double width_;
  double inner_;
  double shared_inner_;
};

}  // namespace crossdock::cli
