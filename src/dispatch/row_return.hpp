#pragma once

#include <cstddef>
#include <functional>

#include "crossdock/strategy.hpp"
#include "dispatch/wire.hpp"

namespace crossdock {

/// The exact way back: rows of ranks that are not near travel to their source by an all-to-all;
/// then every token is summed in slot order, straight out of where its rows are. Collective.
struct ReturnArgs {
  GatherSumArgs sum;
  IsNear is_near;
  std::function<const std::byte*(int rank)> near_rows;  // of near ranks, null if they have none
  bool all_near = false;  // no rank of the group is far from any other: nothing travels
};
void return_and_sum(const Exchange& exchange, const ReturnArgs& args);

/// The same where only a rank's own rows are near.
void return_and_sum(const Exchange& exchange, const GatherSumArgs& args);

}  // namespace crossdock
