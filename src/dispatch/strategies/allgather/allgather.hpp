#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Every rank gets all tokens and keeps those for its experts. Rows return to their source and are
/// summed there; with partial_sums every rank sums its rows of every token, and the sums are
/// reduce-scattered. Sends P - 1 rows per token; at most K return, or P - 1 with partial_sums.
std::unique_ptr<Strategy> make_allgather();

/// [received] the token of every arrival, numbered as on its source. Collective.
std::vector<int64_t> exchange_arrival_tokens(const Exchange& exchange);

}  // namespace crossdock
