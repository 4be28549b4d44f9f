#pragma once

#include <string>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

namespace crossdock::comm {

/// CROSSDOCK_REPORT, or empty.
std::string default_report_file();

/// Appends one line of JSON to the group's report file, if it has one: this rank, what went wrong,
/// and its last events, oldest first; an event under way has no end. Ranks that share the file do
/// not mix their lines. A file that cannot be written is passed over: the error itself matters
/// more.
void write_flight_report(Group& group, const std::string& message, const ErrorContext& context);

}  // namespace crossdock::comm
