// Long waits are announced, once and to whoever asked. For every communicator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "comm/group_runner.hpp"

namespace crossdock::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// A file for each rank, by which a rank tells the others that it has been noticed.
std::filesystem::path file_of(const std::string& job, int rank) {
  return ::testing::TempDir() + "crossdock_wait_" + job + "." + std::to_string(rank);
}

/// The same text on every rank, different for every job.
std::string name_of_job(Group& group) {
  const pid_t own = getpid();
  const Agreement all =
      group.agree({.operation = "name", .body = std::as_bytes(std::span(&own, 1))});
  pid_t of_first = 0;
  std::memcpy(&of_first, all.body(0).data(), sizeof of_first);
  return std::to_string(of_first) + "." + std::to_string(group.size());
}

void wait_for_file(const std::filesystem::path& file) {
  const auto end = std::chrono::steady_clock::now() + kAmple;
  while (!std::filesystem::exists(file)) {
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error("no " + file.string());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(WaitNotice, NamesTheRankThatALongCallWaitsForOnce) {
  for (const int size : group_sizes()) {
    if (size < 2) continue;
    const int late = size / 2;
    const auto outcomes = run_group(size, [&](Group& whole) {
      const std::string job = name_of_job(whole);
      std::vector<WaitNotice> notices;
      GroupOptions options = ample_deadlines();
      options.notice_after = std::chrono::milliseconds(100);
      options.on_wait = [&](const WaitNotice& notice) {
        notices.push_back(notice);
        std::ofstream(file_of(job, notice.rank)) << notice.text();
        throw std::runtime_error("ignored");
      };
      std::vector<int> everyone;
      for (int rank = 0; rank < size; ++rank) everyone.push_back(rank);
      Group group(whole.communicator().subgroup(everyone), options);
      if (group.rank() == late) {
        for (int rank = 0; rank < size; ++rank) {
          if (rank != late) wait_for_file(file_of(job, rank));
        }
        notices.clear();  // of the wait in subgroup
      }
      group.agree({.operation = "hello"});
      if (group.rank() == late) return;
      std::filesystem::remove(file_of(job, group.rank()));
      ASSERT_EQ(notices.size(), 1U);
      const WaitNotice& notice = notices.front();
      EXPECT_EQ(notice.awaited, std::vector<int>{late});
      EXPECT_EQ(notice.operation, "hello");
      EXPECT_EQ(notice.sequence, 1U);
      EXPECT_GE(notice.waited, options.notice_after);
      EXPECT_GT(notice.left, std::chrono::seconds(0));
      EXPECT_THAT(notice.text(), AllOf(StartsWith("rank " + std::to_string(group.rank()) + " of "),
                                       HasSubstr("waiting for rank " + std::to_string(late) +
                                                 " in hello (call 1) for "),
                                       HasSubstr("; gives up in ")));
    });
    for (const Outcome& outcome : outcomes) EXPECT_FALSE(outcome.threw) << outcome.message;
  }
}

TEST(WaitNotice, SaysNothingIfNobodyWaitsLong) {
  run_healthy_group(group_sizes().back(), [](Group& whole) {
    GroupOptions options = ample_deadlines();
    options.notice_after = kAmple;
    options.on_wait = [](const WaitNotice& notice) { ADD_FAILURE() << notice.text(); };
    std::vector<int> everyone;
    for (int rank = 0; rank < whole.size(); ++rank) everyone.push_back(rank);
    Group group(whole.communicator().subgroup(everyone), options);
    for (int i = 0; i < 3; ++i) group.agree({.operation = "hello"});
  });
}

}  // namespace
}  // namespace crossdock::testing
