#pragma once

namespace crossdock::cli {

/// Set in the environment of ranks that this program starts with mpirun.
constexpr const char* kEndsWithParent = "CROSSDOCK_ENDS_WITH_PARENT";

/// If that variable is set, this process ends when its parent (mpirun or its daemon) has ended; a
/// killed mpirun would leave its ranks running. Call it at the start, before MPI is initialised.
void watch_parent();

}  // namespace crossdock::cli
