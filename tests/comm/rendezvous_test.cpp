// Headers and messages of the rendezvous, without ranks.
#include "comm/agreement/rendezvous.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace crossdock::comm {
namespace {

RendezvousHeader header_of(const Proposal& proposal, uint64_t sequence = 12) {
  return make_header(proposal, sequence);
}

std::string difference(const std::string& culprit, const std::string& reference) {
  return describe_other_config({.culprit = 3, .reference = 0, .num_wrong = 1}, culprit, reference);
}

TEST(Rendezvous, EqualHeadersAgree) {
  const std::vector<RendezvousHeader> headers(
      3, header_of({.operation = "plan", .config = "a=1;b=2"}));
  EXPECT_FALSE(find_other_call(headers));
  EXPECT_FALSE(find_other_config(headers));
  EXPECT_EQ(find_refusal(headers), -1);
}

TEST(Rendezvous, ARefusalCarriesItsCodeAndTheSizeOfItsMessage) {
  const Error refusal(ErrorCode::kInvalidArgument, "no");
  const auto header = header_of({.operation = "plan", .refusal = &refusal});
  EXPECT_TRUE(header.refuses());
  EXPECT_EQ(header.refusal_code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(header.body_bytes, 2);
}

TEST(Rendezvous, AnOperationNameMustFitTheHeader) {
  EXPECT_NO_THROW(header_of({.operation = "12345678901234567890123"}));
  EXPECT_THROW(header_of({.operation = "123456789012345678901234"}), Error);
}

TEST(Rendezvous, OfTwoEqualSidesTheOneOfRankZeroIsRight) {
  const auto a = header_of({.operation = "plan", .config = "k=1"});
  const auto b = header_of({.operation = "plan", .config = "k=2"});
  const auto odd = find_other_config(std::vector{a, b, b, a});
  ASSERT_TRUE(odd);
  EXPECT_EQ(odd->reference, 0);
  EXPECT_EQ(odd->culprit, 1);
  EXPECT_EQ(odd->num_wrong, 2);
}

TEST(Rendezvous, SeveralRanksElsewhereAreComparedWithOneThatIsRight) {
  const auto here = header_of({.operation = "dispatch", .subject = 11});
  const auto there = header_of({.operation = "combine", .subject = 11});
  const std::vector<RendezvousHeader> headers = {here, there, here, there, here};
  EXPECT_EQ(describe_other_call(headers, *find_other_call(headers)),
            "rank 1 is at combine of plan 11 while rank 0 is at dispatch of plan 11 (call 12); "
            "every rank must make the same calls in the same order");
}

TEST(Rendezvous, ARankAtAnotherStepIsNamedWithItsStep) {
  const std::vector<RendezvousHeader> headers = {header_of({.operation = "plan"}, 4),
                                                 header_of({.operation = "plan"}, 4),
                                                 header_of({.operation = "plan"}, 3)};
  EXPECT_EQ(describe_other_call(headers, *find_other_call(headers)),
            "rank 2 is at plan at call 3 while the others are at plan (call 4); every rank must "
            "make the same calls in the same order");
}

TEST(Rendezvous, AnotherVersionIsSaidToBeOne) {
  std::vector<RendezvousHeader> headers(2, header_of({.operation = "plan"}));
  headers[1].magic = 7;
  EXPECT_EQ(describe_other_call(headers, *find_other_call(headers)),
            "rank 1 and rank 0 run different versions of Crossdock; all ranks must run the same "
            "build");
}

TEST(Rendezvous, TheFirstSettingThatDiffersIsNamed) {
  EXPECT_EQ(
      difference("a=1;b=3;c=4", "a=1;b=2;c=3"),
      "rank 3 has b=3 where rank 0 has b=2; all ranks of a group must have the same configuration");
  EXPECT_EQ(difference("a=1", "a=1;b=2"),
            "rank 3 has no b where rank 0 has b=2; all ranks of a group must have the same "
            "configuration");
  EXPECT_EQ(difference("a=1;b=2", "a=1"),
            "rank 3 has b=2 where rank 0 has no b; all ranks of a group must have the same "
            "configuration");
  EXPECT_EQ(
      difference("a=;b", "a=;b=1"),
      "rank 3 has b= where rank 0 has b=1; all ranks of a group must have the same configuration");
  EXPECT_EQ(difference("b=2;a=1", "a=1;b=2"),
            "rank 3 has 'b=2;a=1' where rank 0 has 'a=1;b=2'; all ranks of a group must "
            "have the same configuration");
}

TEST(Rendezvous, ALongValueIsShownWhereItDiffers) {
  const std::string common(100, 'x');
  const std::string text = difference("p=" + common + "A" + common, "p=" + common + "B" + common);
  EXPECT_EQ(text, "rank 3 has p=..." + std::string(16, 'x') + "A" + std::string(47, 'x') +
                      "... where rank 0 has p=..." + std::string(16, 'x') + "B" +
                      std::string(47, 'x') +
                      "...; all ranks of a group must have the same configuration");
}

}  // namespace
}  // namespace crossdock::comm
