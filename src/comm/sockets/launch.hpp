#pragma once

#include <string>

namespace crossdock::comm {

/// The first host of a Slurm node list: "gpu[07-09,12],login" gives "gpu07".
std::string first_host(const std::string& node_list);

}  // namespace crossdock::comm
