#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Every rank gets all tokens and keeps its own. The rows go back to their source and are summed
/// there; with partial_sums every rank sums what it has of every token, and the sums are
/// reduce-scattered. P - 1 rows per token travel out; back at most K, or P - 1 with partial_sums.
std::unique_ptr<Strategy> make_allgather();

/// [received] the token of every arrival, as its source counts. Collective.
std::vector<int64_t> exchange_arrival_tokens(const Exchange& exchange);

}  // namespace crossdock
