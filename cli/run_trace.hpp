#pragma once

#include <string>

#include "crossdock/group.hpp"

namespace crossdock::cli {

/// Throws Error if a trace cannot be written to `file`: to be known before a long run.
void check_trace_file(const std::string& file);

/// Writes the events of all ranks to `file` as a Chrome trace, which Perfetto and chrome://tracing
/// open: one track per rank, a second one where work overlapped. Rank 0 writes, to a temporary name
/// first. Collective. Throws Error on all ranks if the file cannot be written.
void write_trace(Group& group, const std::string& file);

}  // namespace crossdock::cli
