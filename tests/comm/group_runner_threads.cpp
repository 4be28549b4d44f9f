#include <atomic>
#include <thread>

#include "comm/group_runner.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::testing {
namespace {

std::atomic<int> num_running = 0;  // ranks of the current run_group

struct Running {
  ~Running() { --num_running; }
};

}  // namespace

std::vector<int> group_sizes() {
  return {1, 2, 4, 7, 8};
}

std::vector<Outcome> run_group(int size, const std::function<void(Group&)>& body,
                               GroupOptions options) {
  num_running = size;
  const auto counted_body = [&](Group& group) {
    const Running until_the_end;
    body(group);
  };
  std::vector<Outcome> outcomes;
  for (const auto& error : try_ranks(size, counted_body, {.ranks_per_node = 0, .group = options})) {
    outcomes.push_back(outcome_of([&] {
      if (error) std::rethrow_exception(error);
    }));
  }
  return outcomes;
}

void stall() {
  while (num_running > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace crossdock::testing
