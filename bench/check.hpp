#pragma once

#include "bench/mover.hpp"
#include "bench/workload.hpp"

namespace crossdock::bench {

/// Writes the results of this rank's experts to y [R, D].
void fill_expert_outputs(const Workload& workload, int rank, TensorView y);

/// Compares all results that the mover holds with the expected ones, which are computed from the
/// workload only: rows, sums and gradient rows bit by bit (sums within fp32 rounding if the mover
/// does not promise exact bits). Throws Error(kInternal) that names the first difference.
void check_move(const Workload& workload, int rank, Mover& mover);

}  // namespace crossdock::bench
