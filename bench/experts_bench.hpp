#pragma once

#include <vector>

#include "bench/measure.hpp"
#include "bench/scenario.hpp"

namespace crossdock::bench {

/// Measures Experts, T / E rows for each expert: forward, dX and dW, each beside the same products
/// as plain calls of a BLAS library with as many threads (step *_blas; left out where there is no
/// OpenBLAS). Checks some rows of the result against the reference.
std::vector<StepResult> run_experts(const Scenario& scenario, Group& group, const Repeats& repeats,
                                    bool check);

}  // namespace crossdock::bench
