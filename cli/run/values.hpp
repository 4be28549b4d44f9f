#pragma once

#include <cstdint>
#include <vector>

#include "cli/run/job.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cli {

/// The tensors of a run; each has different random numbers.
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

/// Uniform random numbers for the tensors of a job. A number depends only on the seed, the tensor,
/// the index (global token or expert) and the position in the row, not on the number of ranks; the
/// dtype only rounds it.
class RunValues {
 public:
  explicit RunValues(const RunJob& job);

  /// Fills `rows` [n, ...]; row i has the index first + i. Rounds to the tensor's dtype.
  void fill(Source source, int64_t first, TensorView rows) const;

  /// One row as doubles, rounded to the dtype.
  std::vector<double> row(Source source, int64_t index, int64_t width, DType dtype) const;

 private:
  double scale_of(Source source) const;

  uint64_t seed_;
  double width_;
  double inner_;
  double shared_inner_;
};

}  // namespace crossdock::cli
