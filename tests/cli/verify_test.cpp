#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/extend/strategy_list.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

TEST(Verify, JudgesEveryStrategyOnTheRanksAskedFor) {
  const CommandResult result =
      run_command("verify --quick --case vector,skew --communicator threads --ranks 1,3 --json");
  EXPECT_EQ(result.status, 0) << result.out;
  EXPECT_THAT(result.err, IsEmpty());
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["passed"], true);
  EXPECT_EQ(json["results"].size(), 2 * strategy_names().size());
  for (const auto& cell : json["results"]) {
    EXPECT_GT(cell["checks"], 5);
    EXPECT_EQ(cell["checks"], cell["selected"]);
    EXPECT_THAT(cell["failures"], IsEmpty());
  }
}

TEST(Verify, StartsMpiRanksItself) {
  if (std::string(CROSSDOCK_MPIRUN).empty()) GTEST_SKIP() << "MPI is not in this build";
  const CommandResult result =
      run_command("verify --communicator mpi --strategy direct --ranks 2 --case vector --json");
  EXPECT_EQ(result.status, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json["results"].size(), 1);
  EXPECT_EQ(json["results"][0]["communicator"], "mpi");
  EXPECT_EQ(json["results"][0]["ranks"], 2);
  EXPECT_GT(json["results"][0]["checks"], 0);
}

TEST(Verify, PrintsATable) {
  const CommandResult result = run_command(
      "verify --communicator threads --ranks 2 --case vector --strategy alltoall,direct");
  EXPECT_EQ(result.status, 0);
  for (const char* words : {"threads, 2 ranks", "alltoall", "direct", " ok", "all passed"}) {
    EXPECT_THAT(result.out, HasSubstr(words));
  }
}

TEST(Verify, SelectsChecksByNameAndDtype) {
  const auto list = [](const std::string& flags) {
    const CommandResult result = run_command("verify --list --json " + flags);
    EXPECT_EQ(result.status, 0) << flags;
    return nlohmann::json::parse(result.out).get<std::vector<std::string>>();
  };
  const std::vector<std::string> all = list("");
  const std::vector<std::string> bf16 = list("--dtype bf16");
  EXPECT_THAT(bf16, Not(IsEmpty()));
  EXPECT_LT(bf16.size(), all.size());
  EXPECT_THAT(bf16, testing::Each(HasSubstr("/bf16/")));
  EXPECT_THAT(list("--case error"), testing::Each(HasSubstr("error")));
  EXPECT_THAT(list("--case 'routing/*'"), testing::Each(testing::StartsWith("routing/")));
  EXPECT_LT(list("--quick").size(), all.size());
}

TEST(Verify, ListsFaultsByPartOrPattern) {
  const auto list = [](const std::string& flags) {
    const CommandResult result = run_command("verify --faults --list --json " + flags);
    EXPECT_EQ(result.status, 0) << flags;
    return nlohmann::json::parse(result.out).get<std::vector<std::string>>();
  };
  const std::vector<std::string> killed = list("--strategy direct --case killed");
  EXPECT_THAT(killed, testing::Contains("direct/killed/mid_dispatch"));
  EXPECT_THAT(killed, testing::Each(testing::StartsWith("direct/killed/")));
  EXPECT_EQ(list("--case 'direct/killed/*'"), killed);
  EXPECT_GT(list("").size(), killed.size());
}

TEST(Verify, ChecksWholeLayers) {
  const CommandResult result =
      run_command("verify --case layer --communicator threads --ranks 3 --strategy direct --json");
  EXPECT_EQ(result.status, 0) << result.out;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["results"][0]["checks"], 48);
  EXPECT_EQ(json["results"][0]["device"], "cpu");
}

TEST(Verify, RandomCasesHaveTheSameBitsOnThreadsAndProcesses) {
  const CommandResult result =
      run_command("verify --random 40 --ranks 2 --communicator threads,sockets --json");
  EXPECT_EQ(result.status, 0) << result.out;
  const auto json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json["results"].size(), 2);
  EXPECT_EQ(json["results"][0]["seed"], json["results"][1]["seed"]);
  EXPECT_EQ(json["results"][0]["checksum"], json["results"][1]["checksum"]) << result.out;
  for (const auto& run : json["results"]) EXPECT_EQ(run["cases"], 40);
}

TEST(Verify, RandomCasesDependOnTheSeed) {
  const auto checksum_of = [](const std::string& options) {
    const CommandResult result = run_command("verify --random 20 --ranks 3 --json " + options);
    EXPECT_EQ(result.status, 0) << result.out;
    return nlohmann::json::parse(result.out)["results"][0]["checksum"];
  };
  EXPECT_EQ(checksum_of("--seed 5"), checksum_of("--seed 5"));
  EXPECT_NE(checksum_of("--seed 5"), checksum_of("--seed 6"));
  EXPECT_NE(checksum_of(""), checksum_of(""));
}

// Before the first case, for runs that are killed.
TEST(Verify, SaysANewSeedFirst) {
  const CommandResult result = run_command("verify --random 3 --ranks 2 --json");
  const auto seed = nlohmann::json::parse(result.out)["results"][0]["seed"].get<std::string>();
  EXPECT_EQ(result.err, "crossdock verify: random cases of seed " + seed + "\n");
  const CommandResult refused = run_command("verify --random 3 --output /dev/null/nowhere");
  EXPECT_EQ(refused.status, 1);
  EXPECT_THAT(refused.out, testing::IsEmpty());
  EXPECT_THAT(refused.err, testing::HasSubstr("cannot write cases to /dev/null/nowhere/"));
}

TEST(Verify, PrintsOneLineAboutRandomCases) {
  const CommandResult result = run_command("verify --random 3 --seed 9 --ranks 2");
  EXPECT_EQ(result.status, 0) << result.out;
  EXPECT_THAT(result.out, testing::MatchesRegex("3 random cases on threads in [0-9.]+ s "
                                                "\\([0-9]+ per second\\), seed 9, at most 2 "
                                                "ranks, checksum [0-9a-f]+: all passed\n"));
}

TEST(Verify, SaysWhyItHasNoGpu) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  const CommandResult result = run_command("verify --device cuda --quick");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("--device cuda needs a GPU: "));
  const CommandResult list = run_command("verify --device cuda --list");
  EXPECT_EQ(list.status, 0);
  EXPECT_THAT(list.out, HasSubstr("layer/skewed/bf16/clamped_swiglu"));
  EXPECT_THAT(list.out, testing::Not(HasSubstr("layer/skewed/fp64")));
}

TEST(Verify, RejectsBadArgumentsWithStatusTwo) {
  expect_bad_arguments({
      {"verify --strategy teleport", "teleport"},
      {"verify --ranks 0", "--ranks"},
      {"verify --case no_such_thing", "no check matches"},
      {"verify --communicator pigeons", "pigeons"},
      {"verify --ranks-per-node -1", "--ranks-per-node must be from 0 to 1024, got -1"},
      {"verify --faults --case no_such_thing", "no fault matches"},
      {"verify --random 0", "--random must be from 1 to 1000000000, got 0"},
      {"verify --random 9223372036854775807", "--random must be from 1 to 1000000000"},
      {"verify --random 5 --first 9223372036854775807", "--first must be from 0 to"},
      {"verify --quick --seed 5", "--seed, --first and --output are for random cases"},
      {"verify --quick --first 0", "--seed, --first and --output are for random cases"},
      {"verify --faults --output /tmp", "--seed, --first and --output are for random cases"},
      {"verify --random 5 --quick", "--random chooses everything itself"},
      {"verify --random 5 --ranks 1,2", "--random takes one number"},
      {"verify --faults --ranks 3", "--faults runs on 4 ranks"},
      {"verify --faults --device cuda", "--faults is for --device cpu"},
      {"verify --faults --case killed --communicator threads", "only processes can be killed"},
  });
}

}  // namespace
}  // namespace crossdock::cli
