#include "comm/engine.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::testing {

std::vector<int> group_sizes() {
  return {1, 2, 4, 7, 8};
}

std::vector<Outcome> run_group(int size, const std::function<void(Group&)>& body,
                               GroupOptions options) {
  std::vector<Outcome> outcomes;
  for (const auto& error : try_ranks(size, body, {.ranks_per_node = 0, .group = options})) {
    outcomes.push_back(outcome_of([&] {
      if (error) std::rethrow_exception(error);
    }));
  }
  return outcomes;
}

}  // namespace crossdock::testing
