#pragma once

#include <string>

/// Files that the commands write. `what` is for messages: "the trace".
namespace crossdock::cli {

/// Throws Error if write_file would fail, as far as can be known without writing.
void check_output_file(const std::string& what, const std::string& file);

/// Writes a file whole or not at all: under a temporary name of its own in the same folder, then
/// renamed. What is not a regular file (a pipe, a device, this process's output) is written in
/// place, and a symbolic link is followed. Throws Error.
void write_file(const std::string& what, const std::string& file, const std::string& text);

}  // namespace crossdock::cli
