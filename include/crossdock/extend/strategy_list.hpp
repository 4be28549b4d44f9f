#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Makes a new strategy, with the same name every time. May be called by several threads at once.
using StrategyFactory = std::function<std::unique_ptr<Strategy>()>;

/// The strategies that can be named and that "auto" and the planner choose from. A value type:
/// copies are independent, and there is no global list. Must be identical on every rank: with
/// "auto", a different list on some rank is an error on all ranks.
///
///   StrategyList candidates = built_in_strategies();
///   candidates.add([] { return std::make_unique<Mine>(); });
///   Dispatcher dispatcher(group, config, "auto", candidates);
class CROSSDOCK_API StrategyList {
 public:
  using Samples = std::vector<std::shared_ptr<const Strategy>>;

  /// Appends a strategy; "auto" prefers the earlier of two with equal cost. Throws
  /// Error(kInvalidArgument) if the name is taken, "auto" or empty, or contains any of the
  /// characters ",;=".
  void add(StrategyFactory make);

  /// Throws Error(kInvalidArgument), listing the valid names, if no strategy has this name.
  std::unique_ptr<Strategy> make(std::string_view name) const;

  std::vector<std::string> names() const;  // in order of preference

  /// One instance of each strategy, in order of preference, to query its name and model.
  Samples::const_iterator begin() const { return samples_.begin(); }
  Samples::const_iterator end() const { return samples_.end(); }

 private:
  Samples samples_;
  std::vector<StrategyFactory> factories_;
};

/// direct, hierarchical, alltoall, allgather.
CROSSDOCK_API StrategyList built_in_strategies();

/// The names of built_in_strategies(), in alphabetical order.
CROSSDOCK_API std::vector<std::string> strategy_names();
/// One of built_in_strategies().
CROSSDOCK_API std::unique_ptr<Strategy> make_strategy(std::string_view name);

}  // namespace crossdock
