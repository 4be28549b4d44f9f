#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/process.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(OpenedLibrary, FindsAFunction) {
  const OpenedLibrary library("libm.so.6");
  EXPECT_EQ(library.file(), "libm.so.6");
  double (*round_down)(double) = nullptr;
  library.find("floor", round_down);
  ASSERT_NE(round_down, nullptr);
  EXPECT_EQ(round_down(2.5), 2.0);
}

TEST(OpenedLibrary, NamesAFileThatIsNotThere) {
  EXPECT_THAT(message_of([] { const OpenedLibrary library("/nowhere/libnothing.so"); },
                         ErrorCode::kUnsupported),
              AllOf(StartsWith("cannot open /nowhere/libnothing.so ("), HasSubstr("No such file")));
}

TEST(OpenedLibrary, NamesAFunctionThatIsNotThere) {
  const OpenedLibrary library("libm.so.6");
  void (*nothing)() = nullptr;
  EXPECT_EQ(
      message_of([&] { library.find("crossdock_nothing", nothing); }, ErrorCode::kUnsupported),
      "libm.so.6 has no function crossdock_nothing");
  EXPECT_EQ(nothing, nullptr);
}

}  // namespace
}  // namespace crossdock
