#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command.hpp"

namespace crossdock::cli {
namespace {

TEST(CppPage, ShowsTheFirstExample) {
  const std::string page = read_project_file("docs/cpp.md");
  const std::string fence = "```cpp\n";
  const size_t begin = page.find(fence) + fence.size();
  const std::string shown = page.substr(begin, page.find("```", begin) - begin);
  EXPECT_THAT(read_project_file("examples/01_single_process.cpp"), testing::HasSubstr(shown));
}

}  // namespace
}  // namespace crossdock::cli
