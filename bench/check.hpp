#pragma once

#include "bench/mover.hpp"
#include "bench/workload.hpp"

namespace crossdock::bench {

/// Writes the answers of this rank's experts into y [R, D].
void fill_expert_outputs(const Workload& workload, int rank, TensorView y);

/// Compares all that the mover has kept with what it must be, computed here from the workload
/// alone: rows, sums and gradient rows bit by bit (the sums of a mover that does not promise bits
/// within fp32 rounding). Throws Error(kInternal) that names the first difference.
void check_move(const Workload& workload, int rank, Mover& mover);

}  // namespace crossdock::bench
