#pragma once

#include <cstdint>

#include "crossdock/testing/conformance.hpp"

namespace crossdock::testing {

/// Gives the routes of a dense world as many slots as the library's plan will have, with the
/// experts of a token ascending and empty slots last. Call after any change to routes, masks, top_k
/// or max_routes_per_token; other worlds are unchanged.
void fit_slots(conformance::World& world);

/// The largest number of rows that any rank receives.
int64_t most_rows(const conformance::World& world);

}  // namespace crossdock::testing
