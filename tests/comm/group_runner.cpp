#include "comm/group_runner.hpp"

#include <gtest/gtest.h>

namespace crossdock::testing {

Outcome outcome_of(const std::function<void()>& body) {
  Outcome outcome;
  try {
    body();
  } catch (const Error& error) {
    outcome = {.threw = true,
               .code = error.code(),
               .culprit = error.context().culprit,
               .sequence = error.context().sequence,
               .operation = error.context().operation,
               .message = error.what()};
  } catch (const std::exception& error) {
    outcome = {.threw = true, .operation = "", .message = error.what()};
  }
  return outcome;
}

void run_healthy_group(int size, const std::function<void(Group&)>& body) {
  const auto outcomes = run_group(size, body, ample_deadlines());
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_FALSE(outcomes[rank].threw) << "rank " << rank << ": " << outcomes[rank].message;
  }
}

}  // namespace crossdock::testing
