#include "crossdock/extend/strategy_list.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "dispatch/strategies/allgather/allgather.hpp"
#include "dispatch/strategies/alltoall/alltoall.hpp"
#include "dispatch/strategies/direct/direct.hpp"
#include "dispatch/strategies/hierarchical/hierarchical.hpp"

namespace crossdock {
namespace {

std::string joined(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? "" : ", ", name);
  return text;
}

}  // namespace

void StrategyList::add(StrategyFactory make) {
  std::shared_ptr<const Strategy> sample = make();
  CROSSDOCK_CHECK(sample != nullptr, "a factory must make a strategy, got none");
  const std::string_view name = sample->name();
  CROSSDOCK_CHECK(
      !name.empty() && name != "auto" && name.find_first_of(",;=") == name.npos,
      "the name of a strategy must not be empty or \"auto\", or contain any of \",;=\"; "
      "got \"",
      name, "\"");
  const bool is_taken = std::any_of(samples_.begin(), samples_.end(),
                                    [&](const auto& other) { return other->name() == name; });
  CROSSDOCK_CHECK(!is_taken, "the list already has a strategy \"", name, "\"");
  samples_.push_back(std::move(sample));
  factories_.push_back(std::move(make));
}

std::unique_ptr<Strategy> StrategyList::make(std::string_view name) const {
  for (size_t i = 0; i < samples_.size(); ++i) {
    if (samples_[i]->name() == name) return factories_[i]();
  }
  throw Error(ErrorCode::kInvalidArgument,
              concat("strategy must be one of ", joined(names()),
                     " (or auto, for a dispatcher); got \"", name, "\""));
}

std::vector<std::string> StrategyList::names() const {
  std::vector<std::string> names;
  for (const auto& sample : samples_) names.emplace_back(sample->name());
  return names;
}

StrategyList built_in_strategies() {
  StrategyList list;
  list.add(make_direct);
  list.add(make_hierarchical);
  list.add(make_alltoall);
  list.add(make_allgather);
  return list;
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names = built_in_strategies().names();
  std::sort(names.begin(), names.end());
  return names;
}

std::unique_ptr<Strategy> make_strategy(std::string_view name) {
  return built_in_strategies().make(name);
}

}  // namespace crossdock
