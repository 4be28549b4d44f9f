#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "crossdock/threads.hpp"
#include "support/file_size_limit.hpp"

namespace crossdock {
namespace {

using testing::HasSubstr;

std::vector<std::string> lines_of(const std::string& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string temporary_file(const std::string& name) {
  return testing::TempDir() + name + "_" + std::to_string(getpid());
}

ThreadOptions report_to(const std::string& file) {
  return {.ranks_per_node = 0,
          .group = {.arrival_deadline = std::chrono::seconds(20), .report_file = file}};
}

// Runs ranks, one of which fails, and returns the lines of their report.
std::vector<std::string> report_of(int num_ranks, const std::function<void(Group&)>& body) {
  const std::string file = temporary_file("flight_report");
  std::remove(file.c_str());
  try_ranks(num_ranks, body, report_to(file));
  const std::vector<std::string> lines = lines_of(file);
  std::remove(file.c_str());
  return lines;
}

TEST(FlightReport, HasALineWithTheLastOperationsOfEveryRank) {
  const std::vector<std::string> lines = report_of(3, [](Group& group) {
    group.agree({.operation = "plan"});
    if (group.rank() == 1) throw std::runtime_error("out of \"cheese\"");
    group.agree({.operation = "dispatch"});
  });
  ASSERT_EQ(lines.size(), 3u);
  for (const std::string& line : lines) {
    EXPECT_THAT(line, HasSubstr(R"("operation":"plan","phase":"rendezvous","sequence":1)"));
    EXPECT_THAT(line, HasSubstr(R"("num_peers":2,"peers":[)"));
    EXPECT_THAT(line, HasSubstr(R"(out of \"cheese\")"));
    // The first rank to fail writes the line of the culprit, which itself has no error.
    const bool is_culprits_own = line.find("\"rank\":1,") != std::string::npos &&
                                 line.find("\"written_by\"") == std::string::npos;
    EXPECT_EQ(line.find("\"culprit\":1,\"operation\":\"dispatch\"") == std::string::npos,
              is_culprits_own);
  }
}

// One rank of two fails; the report goes to `file`.
void write_report(const std::string& file) {
  const auto errors = try_ranks(
      2,
      [](Group& group) {
        if (group.rank() == 1) throw std::runtime_error("failed");
        group.agree({.operation = "plan"});
      },
      report_to(file));
  EXPECT_EQ(std::count(errors.begin(), errors.end(), nullptr), 0);
}

TEST(FlightReport, DoesNotWaitForAReaderOfAPipe) {
  const std::string file = temporary_file("report_pipe");
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  write_report(file);
  EXPECT_TRUE(std::filesystem::is_fifo(file));
  std::remove(file.c_str());
}

TEST(FlightReport, SurvivesALimitOnFileSizes) {
  const std::string file = temporary_file("report_limit");
  {
    const test::FileSizeLimit limit(0);
    write_report(file);
  }
  EXPECT_EQ(lines_of(file).size(), 0u);
  std::remove(file.c_str());
}

TEST(FlightReport, AnUnwritableFileChangesNothing) {
  write_report("/no/such/folder/x");
}

TEST(FlightReport, HasTheLineOfARankThatLeftWithoutAWord) {
  const std::vector<std::string> lines = report_of(3, [](Group& group) {
    group.agree({.operation = "plan"});
    if (group.rank() == 1) return;
    group.agree({.operation = "dispatch"});
  });
  ASSERT_EQ(lines.size(), 3u);
  const auto of_culprit = std::find_if(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find("\"rank\":1,") != std::string::npos;
  });
  ASSERT_NE(of_culprit, lines.end());
  EXPECT_THAT(*of_culprit, HasSubstr("\"written_by\":"));
  EXPECT_THAT(*of_culprit, HasSubstr(R"("operation":"plan","phase":"rendezvous","sequence":1)"));
}

// The message of a failed open, for example, contains the file's name, which may be any bytes.
TEST(FlightReport, IsUtf8WhateverTheMessageIs) {
  const std::vector<std::string> lines = report_of(2, [](Group& group) {
    group.agree({.operation = "plan"});
    if (group.rank() == 1) {
      throw std::runtime_error(
          "good <\xc3\xa9\xe2\x82\xac\xf0\x9f\x9a\x9a> latin-1 <\xe9> overlong <\xc0\xaf> half a "
          "pair <\xed\xa0\x80> too large <\xf4\x90\x80\x80> cut <\xe2\x82");
    }
    group.agree({.operation = "dispatch"});
  });
  ASSERT_EQ(lines.size(), 2u);
  const std::string bad = "\xef\xbf\xbd";  // U+FFFD, one for each byte
  for (const std::string& line : lines) {
    EXPECT_THAT(line, HasSubstr("good <\xc3\xa9\xe2\x82\xac\xf0\x9f\x9a\x9a> latin-1 <" + bad +
                                "> overlong <" + bad + bad + "> half a pair <" + bad + bad + bad +
                                "> too large <" + bad + bad + bad + bad + "> cut <" + bad + bad));
  }
}

}  // namespace
}  // namespace crossdock
