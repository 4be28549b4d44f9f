#pragma once

#include <string>

#include "cli/eval/case.hpp"
#include "cli/eval/run.hpp"

namespace crossdock::cli {

/// How a result compares with the fp64 reference, in one line.
struct CheckReport {
  bool passed = false;
  std::string summary;
};

/// Rows and counts must be equal. Sums must have the reference's bits where the library guarantees
/// exact bits; everything else must agree up to rounding in the dtype.
CheckReport check_result(const EvalCase& eval_case, const EvalResult& result);

}  // namespace crossdock::cli
