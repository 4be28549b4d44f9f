#pragma once

namespace crossdock::cli {

/// Set in the environment of ranks that this program starts.
constexpr const char* kEndsWithParent = "CROSSDOCK_ENDS_WITH_PARENT";

/// If that variable is set, this process ends when its parent (mpirun, its daemon or the launcher
/// of ranks) has ended; otherwise a killed launcher would leave its ranks running. Call this at the
/// start, before MPI is initialised.
void watch_parent();

}  // namespace crossdock::cli
