#pragma once

#include <vector>

#include "bench/measure.hpp"
#include "bench/scenario.hpp"

namespace crossdock::bench {

/// Measures Experts with T / E rows per expert: forward, dX and dW, each compared with the same
/// products as plain calls of a BLAS library with as many threads (step *_blas; skipped without
/// OpenBLAS). Checks some rows of the result against the reference.
std::vector<StepResult> run_experts(const Scenario& scenario, Group& group, const Repeats& repeats,
                                    bool check);

}  // namespace crossdock::bench
