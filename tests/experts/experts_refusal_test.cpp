// The largest sizes that experts take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "crossdock/error.hpp"
#include "crossdock/experts.hpp"

namespace crossdock {
namespace {

TEST(Experts, RefuseSizesThatCannotBeCounted) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto refusal = [](const std::string& words) {
    return testing::ThrowsMessage<Error>(testing::HasSubstr(words));
  };
  EXPECT_THAT([&] { Experts({.width = kMost + 1, .inner = 3}); },
              refusal("width must be in [1, 2147483647], got 2147483648"));
  EXPECT_THAT([&] { Experts({.width = 4, .inner = kMost + 1}); },
              refusal("inner must be in [1, 2147483647], got 2147483648"));
  EXPECT_THAT([&] { Experts({.width = 4, .inner = int64_t{1} << 62}); },
              refusal("inner must be in [1, 2147483647], got 4611686018427387904"));

  // Views of memory that is not there: the call is refused before it reads any.
  const Experts experts({.num_local_experts = 1, .width = 1, .inner = kMost});
  float value = 0;
  constexpr int64_t kRows = int64_t{1} << 40;
  const OneSegment all(kRows);
  const ExpertsForwardArgs args{
      .weights = {{&value, {1, 2 * kMost, 1}}, {&value, {1, 1, kMost}}, {}, {}},
      .rows = {&value, {kRows, 1}},
      .segments = all.view(),
      .row_weights = {},
      .y = {&value, {kRows, 1}}};
  EXPECT_THAT([&] { experts.forward(args); },
              refusal("1099511627776 rows of inner width 2147483647 are more than can be counted"));
}

}  // namespace
}  // namespace crossdock
