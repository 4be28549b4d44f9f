#pragma once

#include <cstdint>
#include <string>

#include "bench/scenario.hpp"

namespace crossdock::bench {

/// Peak memory of all ranks of a scenario together, including staging of the strategies and the
/// buffers of the copy.
int64_t needed_bytes(const Scenario& scenario);

/// Memory that is still available on this machine, or in the control group if that is less.
int64_t available_bytes();

/// Throws Error(kCapacity) if the scenario needs more than is available.
void check_memory(const Scenario& scenario);

/// Throws Error(kCapacity) if `what` ("scenario decode") needs more than is available.
void check_memory(const std::string& what, double needed_bytes, int ranks);

}  // namespace crossdock::bench
