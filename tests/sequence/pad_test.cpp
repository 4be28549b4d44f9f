#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "crossdock/sequence.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using Values = std::vector<double>;

Values numbered(int64_t count, double first) {
  Values values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

// 17 tokens here, 70 at most on any rank, alignment 64.
TEST(PadTokens, WorkedVector) {
  const int64_t T = 17;
  const int64_t num_padded = align_num_tokens(70, 64);
  EXPECT_EQ(num_padded, 128);
  const Values x = numbered(T * 2, 1.0);
  Values padded(static_cast<size_t>(num_padded * 2), -1.0);
  pad_tokens({x.data(), {T, 2}}, {padded.data(), {num_padded, 2}});
  Values wanted = x;
  wanted.resize(padded.size(), 0.0);
  EXPECT_EQ(padded, wanted);
  Values trimmed(x.size());
  trim_tokens({padded.data(), {num_padded, 2}}, {trimmed.data(), {T, 2}});
  EXPECT_EQ(trimmed, x);
}

// <pad(x), g> = <x, trim(g)>: each is the backward of the other.
TEST(PadTokens, IsTheTransposeOfTrimTokens) {
  for (const int64_t T : {0, 1, 5, 8}) {
    const Values x = numbered(T * 3, 1.0);
    const Values g = numbered(24, -7.0);
    Values padded(24);
    Values trimmed(x.size());
    pad_tokens({x.data(), {T, 3}}, {padded.data(), {8, 3}});
    trim_tokens({g.data(), {8, 3}}, {trimmed.data(), {T, 3}});
    EXPECT_EQ(std::inner_product(padded.begin(), padded.end(), g.begin(), 0.0),
              std::inner_product(x.begin(), x.end(), trimmed.begin(), 0.0));
  }
}

TEST(PadTokens, PadRowsAreMasked) {
  bool padded[5] = {};
  const bool mask[3] = {false, true, false};
  pad_mask(3, {mask, {3}}, {padded, {5}});
  EXPECT_THAT(padded, testing::ElementsAre(false, true, false, true, true));
  pad_mask(2, {}, {padded, {5}});
  EXPECT_THAT(padded, testing::ElementsAre(false, false, true, true, true));
  pad_mask(0, {}, {padded, {5}});
  EXPECT_THAT(padded, testing::Each(true));
}

TEST(PadTokens, CountsAreAligned) {
  EXPECT_EQ(align_num_tokens(0, 8), 0);
  EXPECT_EQ(align_num_tokens(1, 8), 8);
  EXPECT_EQ(align_num_tokens(8, 8), 8);
  EXPECT_EQ(align_num_tokens(9, 1), 9);
  EXPECT_EQ(message_of([] { static_cast<void>(align_num_tokens(3, 0)); }),
            "alignment must be in [1, 2^60], got 0");
  EXPECT_EQ(message_of([] { static_cast<void>(align_num_tokens(-3, 2)); }),
            "num_tokens must be in [0, 2^60], got -3");
}

TEST(PadTokens, RefusesTensorsThatDoNotFit) {
  Values x(12);
  Values padded(24);
  EXPECT_EQ(message_of([&] {
              pad_tokens({x.data(), {4, 3}}, {padded.data(), {3, 3}});
            }),
            "padded must have the dtype and row shape of x and at least as many rows; x is [4, 3] "
            "fp64, padded is [3, 3] fp64");
  EXPECT_EQ(message_of([&] {
              trim_tokens({padded.data(), {8, 3}}, {x.data(), {6, 2}});
            }),
            "padded must have the dtype and row shape of x and at least as many rows; x is [6, 2] "
            "fp64, padded is [8, 3] fp64");
  EXPECT_EQ(message_of([&] {
              pad_tokens({padded.data(), {2, 3}}, {padded.data(), {8, 3}});
            }),
            "padded overlaps x; outputs must have memory of their own");
  bool mask[4] = {};
  EXPECT_EQ(message_of([&] {
              pad_mask(5, {}, {mask, {4}});
            }),
            "padded must be [T_padded] bool with T_padded at least num_tokens (5), got [4] bool");
}

}  // namespace
}  // namespace crossdock
