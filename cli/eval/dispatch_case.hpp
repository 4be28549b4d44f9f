#pragma once

#include <string>

#include "crossdock/testing/random_worlds.hpp"

namespace crossdock::cli {

/// A case file that judges every call of a dispatcher (docs/case_format.md).
struct DispatchCase {
  std::string strategy;                  // a name, or "auto"
  std::string communicator = "threads";  // or "sockets" or "mpi"
  std::string device = "cpu";            // or "cuda"
  int ranks_per_node = 0;                // 0: as the communicator reports
  conformance::World world;

  int num_ranks() const { return static_cast<int>(world.ranks.size()); }
};

/// The "kind" of a case; empty if it has none. Throws Error(kInvalidArgument) if the text is not
/// JSON.
std::string kind_of_case(const std::string& text);

/// REQUIRES: kind_of_case is "dispatch". Throws Error(kInvalidArgument) if the case is not valid.
DispatchCase parse_dispatch_case(const std::string& text);

/// The inverse of parse_dispatch_case.
std::string to_json(const DispatchCase& dispatch_case);

}  // namespace crossdock::cli
