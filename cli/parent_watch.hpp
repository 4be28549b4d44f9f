#pragma once

namespace crossdock::cli {

/// In the environment of ranks that this program starts through mpirun.
constexpr const char* kEndsWithParent = "CROSSDOCK_ENDS_WITH_PARENT";

/// If the environment says so, this process ends when its parent, mpirun or its daemon, has ended:
/// mpirun that is killed leaves its ranks running. To be called at the start, before MPI is
/// initialised.
void watch_parent();

}  // namespace crossdock::cli
