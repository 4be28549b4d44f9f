#pragma once

#include <cstdint>
#include <string>

#include "bench/scenario.hpp"

namespace crossdock::bench {

/// Bytes that all ranks of a scenario hold together at the most, staging of the strategies and the
/// buffers of the copy included.
int64_t needed_bytes(const Scenario& scenario);

/// Memory this machine can still give; of the control group, where that is less.
int64_t available_bytes();

/// Throws Error(kCapacity) if the scenario needs more than there is.
void check_memory(const Scenario& scenario);

/// Throws Error(kCapacity) if `what` ("scenario decode") needs more than there is.
void check_memory(const std::string& what, double needed_bytes, int ranks);

}  // namespace crossdock::bench
