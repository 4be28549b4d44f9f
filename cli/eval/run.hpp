#pragma once

#include <cstdint>
#include <vector>

#include "cli/eval/case.hpp"
#include "crossdock/group.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::cli {

/// Results of one rank. Doubles represent the values of every dtype exactly.
struct EvalRank {
  std::vector<double> rows;              // [R, D], pad rows included
  std::vector<int64_t> rows_per_expert;  // [E_local], without pad rows
  std::vector<double> out;               // [T, D]
  std::vector<double> grad_x;            // [T, D]
  std::vector<double> grad_weights;      // [T, K]
  std::vector<int64_t> dropped;          // [E]
};

struct EvalResult {
  std::vector<EvalRank> ranks;                      // [P]
  std::vector<reference::MlpWeights> expert_grads;  // [E], or empty

  /// [E] summed over ranks
  std::vector<int64_t> dropped() const;
};

/// A result of the right size, without values.
EvalResult empty_result(const EvalCase& eval_case);

/// Runs the case as one rank of a group and sets this rank's part of the result. Collective.
void run_rank(Group& group, const EvalCase& eval_case, EvalResult& result);

/// Runs the case with the library, forward and backward, with ranks as threads of this process.
/// Throws the library's Error, which is identical on every rank.
EvalResult run_case(const EvalCase& eval_case);

}  // namespace crossdock::cli
