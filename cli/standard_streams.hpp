#pragma once

namespace crossdock::cli {

/// Opens those of standard input, output and error that are closed, so that no file or connection
/// gets their numbers. What is read or written there still fails, also in processes that this one
/// starts. Call this first.
void open_missing_streams();

/// Whether all of standard output has been written.
bool flush_output();

}  // namespace crossdock::cli
