#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <optional>
#include <vector>

#include "comm/failure.hpp"
#include "crossdock/threads.hpp"
#include "support/missing_memory.hpp"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

TEST(GroupMemory, MissingInARendezvousIsTheSameErrorEverywhere) {
  constexpr int64_t kBody = 100000;  // of rank 1; the other sizes are different
  const MissingMemory missing(kBody);
  run_ranks(2, [&](Group& group) {
    const std::vector<std::byte> body(group.rank() == 1 ? kBody : kBody / 2);
    std::string message = "nothing was thrown";
    try {
      group.agree({.operation = "count", .config = {}, .body = body});
    } catch (const Error& error) {
      message = error.what();
      EXPECT_EQ(error.context().culprit, 1) << "rank " << group.rank();
      EXPECT_STREQ(error.context().operation, "count") << "rank " << group.rank();
    }
    EXPECT_THAT(message, HasSubstr("not enough memory")) << "rank " << group.rank();
    EXPECT_TRUE(group.is_poisoned()) << "rank " << group.rank();
  });
  EXPECT_EQ(MissingMemory::num_refused(), 1);
}

TEST(GroupMemory, ARefusalForWantOfMemoryHasItsCodeOnAllRanks) {
  run_ranks(2, [&](Group& group) {
    const std::optional<Error> refusal = refusal_of([&] {
      if (group.rank() == 1) throw std::bad_alloc();
    });
    try {
      group.agree({.operation = "count", .config = {}, .refusal = as_refusal(refusal)});
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
      EXPECT_STREQ(error.what(), "rank 1: not enough memory");
    }
    EXPECT_FALSE(group.is_poisoned());
  });
}

}  // namespace
}  // namespace crossdock
