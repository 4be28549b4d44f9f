#include <gtest/gtest.h>

#include <cstdlib>

#include "comm/waiting.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Variable {
  Variable(const char* name_in, const char* value) : name(name_in) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  const char* name;
};

std::string message_for(const char* value) {
  const Variable variable("CROSSDOCK_ARRIVAL_DEADLINE", value);
  try {
    default_arrival_deadline();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Deadlines, HaveDefaults) {
  EXPECT_EQ(default_arrival_deadline(), seconds(600));
  EXPECT_EQ(default_progress_deadline(), seconds(30));
}

TEST(Deadlines, ComeFromTheEnvironment) {
  const Variable arrival("CROSSDOCK_ARRIVAL_DEADLINE", "2.5");
  const Variable progress("CROSSDOCK_PROGRESS_DEADLINE", "1e12");
  const auto communicators = make_thread_communicators(1);
  EXPECT_EQ(default_arrival_deadline(), milliseconds(2500));
  EXPECT_GT(default_progress_deadline(), std::chrono::hours(100000));
  run_ranks(1, [](Group& group) {
    EXPECT_EQ(group.options().arrival_deadline, milliseconds(2500));
    group.agree({.operation = "plan"});
  });
}

TEST(Deadlines, IgnoreEmptyVariables) {
  const Variable arrival("CROSSDOCK_ARRIVAL_DEADLINE", "");
  EXPECT_EQ(default_arrival_deadline(), seconds(600));
}

TEST(Deadlines, MustBePositiveNumbers) {
  EXPECT_EQ(message_for("soon"),
            "CROSSDOCK_ARRIVAL_DEADLINE must be a positive number of seconds such as 600 or 2.5, "
            "got 'soon'");
  for (const char* value : {"0", "-1", "5 s", " 5", "5 ", "0x10", "+5", "nan", "inf"}) {
    EXPECT_NE(message_for(value), "") << value;
  }
}

TEST(Deadlines, OfAGroupMustBePositive) {
  EXPECT_THROW(
      run_ranks(1, [](Group&) {}, {.ranks_per_node = 0, .group = {.arrival_deadline = seconds(0)}}),
      Error);
}

TEST(Deadlines, AreShownInSeconds) {
  EXPECT_EQ(to_seconds_text(seconds(30)), "30 s");
  EXPECT_EQ(to_seconds_text(milliseconds(250)), "0.25 s");
}

TEST(Deadlines, LieInTheFutureHoweverLongTheyAre) {
  const auto now = Clock::now();
  EXPECT_GT(deadline_after(now, std::chrono::nanoseconds::max()), now + seconds(1000000));
}

}  // namespace
}  // namespace crossdock::comm
