#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "crossdock/build.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

TEST(Command, PrintsItsVersion) {
  const CommandResult result = run_command("--version");
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out, "crossdock " + std::string(describe_build().version) + "\n");
}

TEST(Command, HelpsWithExamples) {
  for (const char* arguments : {"--help", "eval --help"}) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 0);
    EXPECT_THAT(result.out, HasSubstr("crossdock eval examples/cases/demo.json"));
    EXPECT_THAT(result.err, IsEmpty());
  }
}

TEST(Command, RejectsBadArgumentsWithStatusTwo) {
  const std::vector<std::pair<const char*, const char*>> known = {
      {"", "a command is required"},
      {"frobnicate", "\"frobnicate\""},
      {"--frobnicate", "--frobnicate"},
      {"eval", "CASE is required"},
      {"eval --frob case.json", "--frob"},
      {"eval one.json two.json", "two.json"},
      {"info extra", "extra"},
  };
  for (const auto& [arguments, word] : known) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_THAT(result.out, IsEmpty()) << arguments;
    EXPECT_THAT(result.err, HasSubstr(word)) << arguments;
    EXPECT_THAT(result.err, HasSubstr("--help")) << arguments;
  }
}

TEST(Command, FailsWhereItsOutputCannotBeWritten) {
  const std::vector<std::string> known = {
      "--help",
      "info",
      "plan --model mixtral-8x7b --tokens 8",
      "run --tokens 4 --steps 1",
      std::string("eval ") + CROSSDOCK_SOURCE_DIR + "/examples/cases/worked.json",
      "verify --faults --list",
  };
  for (const std::string& arguments : known) {
    const CommandResult result = run_command(arguments + " > /dev/full");
    EXPECT_EQ(result.status, 1) << arguments;
    EXPECT_THAT(result.err, HasSubstr("cannot write to standard output")) << arguments;
  }
}

TEST(Info, SaysWhatWorksAndWhyNot) {
  const CommandResult result = run_command("info");
  EXPECT_EQ(result.status, 0);
  for (const char* word : {"threads", "mpi", "cuda", "alltoall", "cores"}) {
    EXPECT_THAT(result.out, HasSubstr(word));
  }
}

TEST(Info, PrintsJson) {
  const CommandResult result = run_command("info --json");
  EXPECT_EQ(result.status, 0);
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["version"], std::string(describe_build().version));
  EXPECT_EQ(json["parts"][0]["name"], "threads");
  EXPECT_EQ(json["parts"][0]["works"], true);
  EXPECT_GT(json["machine"]["cores"], 0);
  for (const auto& part : json["parts"]) EXPECT_FALSE(part["note"].get<std::string>().empty());
}

}  // namespace
}  // namespace crossdock::cli
