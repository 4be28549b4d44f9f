#pragma once

#include <string>

/// Files that the commands write. `what` is for messages: "the trace".
namespace crossdock::cli {

/// Throws Error if write_file would certainly fail, without writing.
void check_output_file(const std::string& what, const std::string& file);

/// Writes a file completely or not at all: to a temporary file in the same folder, which is then
/// renamed. Anything but a regular file (a pipe, a device, this process's output) is written in
/// place; symbolic links are followed. Throws Error.
void write_file(const std::string& what, const std::string& file, const std::string& text);

}  // namespace crossdock::cli
