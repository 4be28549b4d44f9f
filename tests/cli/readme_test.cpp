#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command.hpp"

namespace crossdock::cli {
namespace {

TEST(Readme, ShowsTheFirstExample) {
  const std::string readme = read_project_file("README.md");
  const std::string fence = "```cpp\n";
  const size_t begin = readme.find(fence) + fence.size();
  const std::string shown = readme.substr(begin, readme.find("```", begin) - begin);
  EXPECT_THAT(read_project_file("examples/01_single_process.cpp"), testing::HasSubstr(shown));
}

}  // namespace
}  // namespace crossdock::cli
