#pragma once

namespace crossdock::cli {

/// A port of this machine that is free now, for SocketsLaunch::master_port. If another program
/// takes it in the meantime, rank 0 uses one of the next ports. 0 if there is none.
int find_free_port();

}  // namespace crossdock::cli
