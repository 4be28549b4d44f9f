#include <array>

#include "core/check.hpp"
#include "crossdock/extend/strategy.hpp"
#include "dispatch/strategies/allgather/allgather.hpp"
#include "dispatch/strategies/alltoall/alltoall.hpp"
#include "dispatch/strategies/direct/direct.hpp"

namespace crossdock {
namespace {

struct Entry {
  std::string_view name;
  std::unique_ptr<Strategy> (*make)();
};

// A strategy joins by a line here.
constexpr std::array kStrategies = {
    Entry{"allgather", make_allgather},
    Entry{"alltoall", make_alltoall},
    Entry{"direct", make_direct},
    Entry{"hierarchical", make_hierarchical},
};

}  // namespace

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  names.reserve(kStrategies.size());
  for (const Entry& entry : kStrategies) names.emplace_back(entry.name);
  return names;
}

std::unique_ptr<Strategy> make_strategy(std::string_view name) {
  std::string known;
  for (const Entry& entry : kStrategies) {
    if (entry.name == name) return entry.make();
    known += concat(known.empty() ? "" : ", ", entry.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              concat("strategy must be one of ", known, " (or auto, for a dispatcher); got \"",
                     name, "\""));
}

}  // namespace crossdock
