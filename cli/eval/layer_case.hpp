#pragma once

#include <string>

#include "crossdock/testing/layer_worlds.hpp"

namespace crossdock::cli {

/// A case of a whole layer (docs/case_format.md, "Whole layers").
struct LayerCase {
  std::string strategy;                  // a name, or "auto"
  std::string communicator = "threads";  // or "sockets" or "mpi"
  std::string device = "cpu";            // or "cuda"
  int ranks_per_node = 0;                // 0: as the communicator reports
  conformance::LayerSpec layer;
};

/// REQUIRES: kind_of_case is "layer". Throws Error(kInvalidArgument) if the case is not valid.
LayerCase parse_layer_case(const std::string& text);

}  // namespace crossdock::cli
