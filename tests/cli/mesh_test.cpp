#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/command.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;

const char* const kFolded = "mesh --world 16 --tp 2 --pp 2 --cp 2 --ep 2";

TEST(Mesh, ShowsGroupsAndCoordinates) {
  const CommandResult result = run_command(kFolded);
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.err, IsEmpty());
  for (const char* text :
       {"16 ranks: dense tp 2 x cp 2 x dp 2 x pp 2; experts etp 1 x ep 2 x edp 4",
        "  group     size  number  ranks\n", "  tp           2       8  0,1 2,3 4,5",
        "  tp_cp_dp     8       2  0,1,2,3,4,5,6,7 8,9,10,11,12,13,14,15\n",
        "  edp          4       4  0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15\n",
        "  rank  tp  cp  dp  pp  etp  ep  edp\n", "    13   1   0   1   1    0   1    2\n"}) {
    EXPECT_THAT(result.out, HasSubstr(text));
  }
}

TEST(Mesh, SummarisesManyRanks) {
  const CommandResult result = run_command("mesh --world 1024 --tp 8 --ep 64");
  EXPECT_EQ(result.status, 0);
  EXPECT_LT(std::ranges::count(result.out, '\n'), 40) << result.out;
  EXPECT_THAT(result.out, HasSubstr("  tp           8     128  0,1,2,3,4,5,6,7; 8,9,10,11,12"));
  EXPECT_THAT(result.out, HasSubstr("--rank N shows"));
  EXPECT_EQ(json::parse(run_command("mesh --world 1024 --tp 8 --json").out)["ranks"].size(), 1024U);
}

TEST(Mesh, ShowsOneRank) {
  const std::string mesh = std::string(kFolded) + " --rank 13";
  const CommandResult result = run_command(mesh);
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, HasSubstr("    13   1   0   1   1    0   1    2\n"));
  EXPECT_THAT(result.out, HasSubstr("  edp          4  9,11,13,15\n"));
  EXPECT_THAT(result.out, testing::Not(HasSubstr("    12   0")));
  const json one = json::parse(run_command(mesh + " --json").out);
  EXPECT_EQ(one["rank"]["dp"], 1);
  EXPECT_EQ(one["groups"]["edp"], json::parse("[9, 11, 13, 15]"));
  expect_bad_arguments(
      {{"mesh --world 4 --rank 4", "--rank must be below the number of ranks, 4"}});
}

TEST(Mesh, PrintsJson) {
  const CommandResult result = run_command(std::string(kFolded) + " --json");
  EXPECT_EQ(result.status, 0) << result.err;
  const json mesh = json::parse(result.out);
  EXPECT_EQ(mesh["shape"], json::parse(R"({"world": 16, "tp": 2, "cp": 2, "dp": 2, "pp": 2,
                                           "etp": 1, "ep": 2, "edp": 4})"));
  EXPECT_EQ(mesh["groups"].size(), 12U);
  EXPECT_EQ(mesh["groups"]["edp"],
            json::parse("[[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]"));
  ASSERT_EQ(mesh["ranks"].size(), 16U);
  EXPECT_EQ(mesh["ranks"][13], json::parse(R"({"rank": 13, "tp": 1, "cp": 0, "dp": 1, "pp": 1,
                                               "etp": 0, "ep": 1, "edp": 2})"));
}

TEST(Mesh, AMeshThatCannotExistNamesTheRuleAndTheNumbers) {
  const CommandResult result = run_command("mesh --world 16 --pp 2 --etp 2 --ep 8");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, IsEmpty());
  EXPECT_THAT(result.err,
              HasSubstr("crossdock mesh: etp (2) times ep (8) must divide the 8 ranks of "
                        "a pipeline stage; the largest ep below that does is 4"));
  const CommandResult as_json = run_command("mesh --tp 2 --json");
  EXPECT_EQ(as_json.status, 1);
  EXPECT_THAT(json::parse(as_json.out)["error"].get<std::string>(),
              HasSubstr("world must be given"));
}

TEST(Mesh, RejectsBadArgumentsWithStatusTwo) {
  expect_bad_arguments({
      {"mesh --world 0", "--world must be at least 1, got 0"},
      {"mesh --tp two", "--tp must be a whole number, got \"two\""},
      {"mesh --nodes 2", "--nodes"},
      {"mesh extra", "extra"},
  });
}

TEST(Mesh, HelpNamesEverySize) {
  const CommandResult result = run_command("mesh --help");
  EXPECT_EQ(result.status, 0);
  for (const char* name :
       {"--world", "--tp", "--cp", "--dp", "--pp", "--etp", "--ep", "--edp", "--json"}) {
    EXPECT_THAT(result.out, HasSubstr(name));
  }
}

}  // namespace
}  // namespace crossdock::cli
