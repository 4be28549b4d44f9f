#pragma once

#include <optional>
#include <string>

#include "crossdock/testing/layer_worlds.hpp"

namespace crossdock::cli {

/// A case of a whole layer (docs/case_format.md, "Whole layers").
struct LayerCase {
  std::string strategy;
  int ranks_per_node = 0;
  std::string device = "cpu";
  conformance::LayerSpec layer;
};

/// Nothing if the text is not a JSON object with the key "layer". Throws Error(kInvalidArgument) if
/// it is one, but not a valid case.
std::optional<LayerCase> parse_layer_case(const std::string& text);

/// Runs a layer's case and prints its results. Returns the exit status: 1 if `check` is set and
/// there is a difference, which it reports on standard error.
int run_layer_case(const LayerCase& layer_case, const std::string& communicator, bool check);

}  // namespace crossdock::cli
