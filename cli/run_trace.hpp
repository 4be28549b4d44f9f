#pragma once

#include <string>

#include "crossdock/group.hpp"

namespace crossdock::cli {

/// Writes the events of all ranks to `file` as a Chrome trace, which Perfetto and chrome://tracing
/// open: one track per rank, a second one where work overlapped. Rank 0 writes, to a temporary name
/// first. Collective. Throws Error on all ranks if the file cannot be written.
void write_trace(Group& group, const std::string& file);

}  // namespace crossdock::cli
