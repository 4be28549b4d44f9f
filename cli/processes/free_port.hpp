#pragma once

namespace crossdock::cli {

/// A port of this machine that is free now, for SocketsLaunch::master_port: should another program
/// take it meanwhile, rank 0 uses one of the next. 0 if there is none.
int find_free_port();

}  // namespace crossdock::cli
