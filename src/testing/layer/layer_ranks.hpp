#pragma once

#include <vector>

#include "crossdock/testing/layer_worlds.hpp"
#include "crossdock/testing/reference_router.hpp"

namespace crossdock::conformance {

/// What gradients hold before a backward that accumulates.
inline constexpr double kInitialGradient = 0.5;

/// The ranks of `rank`'s group, ascending. `groups` [P] as in LayerSpec; empty: all ranks.
std::vector<int> members_of(const std::vector<int64_t>& groups, int num_ranks, int rank);

/// The tokens with which a rank takes part: all of its own, or its slice of replicated tokens.
LayerTokens slice_of(const LayerSpec& spec, const std::vector<LayerTokens>& ranks, int rank);

/// The experts of a rank, ascending.
std::vector<int64_t> experts_of(const LayerSpec& spec, int rank);

reference::MlpConfig mlp_of(const LayerSpec& spec, int64_t inner);

/// The router's input for a rank's slice; x is multiplied by the jitter.
reference::RouterInput router_input(const LayerWorld& world, const LayerTokens& slice);

}  // namespace crossdock::conformance
