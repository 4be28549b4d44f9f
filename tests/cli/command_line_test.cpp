// What can be typed: names, sizes, help, completions and man pages; and how mistakes are reported.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

const std::string kSmallRun =
    "run --width 8 --inner 8 --experts 4 --top-k 2 --ranks 2 --steps 1 --no-check ";

TEST(Suggestions, NameWhatWasProbablyMeant) {
  expect_bad_arguments({
      {"rnu", "did you mean \"run\"?"},
      {"run --rank 2", "did you mean \"--ranks\"?"},
      {"run --rank=2", "did you mean \"--ranks\"?"},
      {"run --preset qwen", "did you mean \"qwen3-30b-a3b\"?"},
      {"run --strategy dirct", "did you mean \"direct\"?"},
      {"plan --fabric H200 --model mixtral-8x7b", "did you mean \"h200-nvlink-400g\"?"},
      {"plan --fabric b200 --model mixtral-8x7b", "did you mean \"b200-nvlink-400g\"?"},
      {"plan --fabric gb20 --model mixtral-8x7b", "did you mean \"gb200\"?"},
      {"plan --fabric a100 --model mixtral-8x7b", "did you mean \"a100-nvlink-200g\"?"},
      {"plan --fabric nvlink --model mixtral-8x7b", "did you mean \"h100-nvlink-400g\"?"},
      {"plan --fabric ethrenet --model mixtral-8x7b", "did you mean \"ethernet\"?"},
      {"bench --scenario cpu-lage", "did you mean \"cpu-large\"?"},
      {"verify --communicator socket", "did you mean \"sockets\"?"},
  });
}

TEST(Suggestions, AreNotGivenForOtherWords) {
  for (const char* arguments : {"frobnicate", "run --frobnicate", "run --strategy teleport"}) {
    EXPECT_THAT(run_command(arguments).err, Not(HasSubstr("did you mean"))) << arguments;
  }
  // Names that a list would bury.
  EXPECT_THAT(run_command("bench --scenario xyz").err, HasSubstr("`crossdock bench --list`"));
}

TEST(Help, IsACommandToo) {
  EXPECT_EQ(run_command("help").out, run_command("--help").out);
  EXPECT_EQ(run_command("help plan").out, run_command("plan --help").out);
  EXPECT_THAT(run_command("help plan").out, HasSubstr("--fabric"));
  expect_bad_arguments({{"help rum", "did you mean \"run\"?"}});
}

TEST(Help, VersionHasThreeNames) {
  const std::string version = "crossdock " + std::string(describe_build().version) + "\n";
  for (const char* arguments : {"--version", "-V", "version"}) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 0) << arguments;
    EXPECT_EQ(result.out, version) << arguments;
  }
}

TEST(Sizes, TakeLettersAndPowersOfTen) {
  const auto tokens = [](const std::string& text) {
    const CommandResult result = run_command("plan --model mixtral-8x7b --json --tokens " + text);
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    return nlohmann::json::parse(result.out)["job"]["tokens_per_rank"].get<int64_t>();
  };
  EXPECT_EQ(tokens("8k"), 8192);
  EXPECT_EQ(tokens("8K"), 8192);
  EXPECT_EQ(tokens("1M"), 1048576);
  EXPECT_EQ(tokens("1e6"), 1000000);
  EXPECT_EQ(tokens("0010"), 10);
  expect_bad_arguments({
      {"run --tokens 1kk", "--tokens must be a whole number, got \"1kk\""},
      {"run --tokens 1.5k", "--tokens must be a whole number"},
      {"run --tokens k", "--tokens must be a whole number"},
      {"run --tokens 1e", "--tokens must be a whole number"},
      {"run --tokens 1e-3", "--tokens must be a whole number"},
      {"run --tokens 8G", "--tokens must be from 0 to 2147483648, got 8G"},
      {"run --steps 9e99", "--steps must be from 1 to 2147483647, got 9e99"},
      {"run --steps -1k", "--steps must be at least 1, got -1k"},
      {"bench --tokens 1k:x", "--tokens must be a whole number or a range"},
  });
}

TEST(Sizes, OfASweepTakeThemToo) {
  const CommandResult result = run_command(
      "bench --tokens 1k:2k:x2 --width 8 --experts 4 --top-k 1 --ranks 1 --repeat 1 --warm-up 0 "
      "--strategy direct --communicator threads --json");
  ASSERT_EQ(result.status, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json[0]["tokens"], 1024);
  EXPECT_EQ(json[1]["tokens"], 2048);
}

TEST(Json, HasTheErrorOfBadArguments) {
  for (const char* arguments : {"run --json --preset nope", "run --preset nope --json",
                                "plan --json", "bench --format json --ranks x",
                                "bench --json --format csv", "mesh --world 4 --rank 4 --json"}) {
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    const auto json = nlohmann::json::parse(result.out, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object()) << arguments << ": " << result.out;
    EXPECT_THAT(json["error"].get<std::string>(), Not(IsEmpty())) << arguments;
  }
}

// The words that bash offers after this line.
std::string completed(const std::string& line) {
  const std::string script =
      "source <(" CROSSDOCK_COMMAND " completion bash); COMP_WORDS=(" + line +
      "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _crossdock; echo \" ${COMPREPLY[*]} \"";
  return run_program("bash -c '" + script + "'").out;
}

TEST(Completion, InBashOffersCommandsOptionsAndValues) {
  EXPECT_THAT(completed("crossdock ve"), HasSubstr(" verify version "));
  EXPECT_THAT(completed("crossdock run --str"), HasSubstr(" --strategy "));
  EXPECT_THAT(completed("crossdock run --strategy h"), HasSubstr(" hierarchical "));
  EXPECT_THAT(completed("crossdock plan --fabric gb"), HasSubstr(" gb200 "));
  EXPECT_THAT(completed("crossdock help m"), HasSubstr(" mesh "));
  // bash splits a line at = signs.
  EXPECT_THAT(completed("crossdock run --preset ="), HasSubstr(" gpt-oss-20b "));
  EXPECT_EQ(completed("crossdock run --preset = qw"), " qwen3-30b-a3b \n");
  EXPECT_EQ(completed("crossdock run --preset=qw"), " --preset=qwen3-30b-a3b \n");
  EXPECT_EQ(completed("crossdock verify --strategy direct,alltoall,h"),
            " direct,alltoall,hierarchical \n");
  EXPECT_EQ(completed("crossdock verify --dtype = fp32,b"), " fp32,bf16 \n");
}

TEST(Suggestion, NamesNoHiddenOption) {
  EXPECT_THAT(run_command("verify --always-zer").err, Not(HasSubstr("always-zero")));
  EXPECT_THAT(run_command("verify --communicato x").err, HasSubstr("--communicator"));
}

TEST(Completion, OfEveryShellHasEveryOptionOfEveryCommand) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const CommandResult result = run_command(std::string("completion ") + shell);
    EXPECT_EQ(result.status, 0) << shell;
    const bool is_fish = std::string(shell) == "fish";
    for (const char* name : {"strategy", "scenario", "micro-batch", "faults", "check", "world"}) {
      EXPECT_THAT(result.out, HasSubstr((is_fish ? "-l " : "--") + std::string(name))) << shell;
    }
    EXPECT_THAT(result.out, HasSubstr("h200-nvlink-400g")) << shell;
    EXPECT_THAT(result.out, Not(HasSubstr("always-zero"))) << shell;  // hidden
    // The shell itself reads it, where it is installed.
    const std::string check = std::string("if command -v ") + shell + "; then " CROSSDOCK_COMMAND +
                              " completion " + shell + " | " + shell + " -n; fi";
    const CommandResult read = run_program("sh -c '" + check + "'");
    EXPECT_EQ(read.status, 0) << shell << ": " << read.err;
    EXPECT_THAT(read.err, IsEmpty()) << shell;
  }
}

TEST(ManPage, SaysWhatHelpSays) {
  const CommandResult page = run_command("man run");
  EXPECT_EQ(page.status, 0);
  for (const char* words : {".TH crossdock-run 1", ".SH SYNOPSIS", "\\fB\\-\\-strategy\\fR NAME",
                            "How rows are moved", "torchrun"}) {
    EXPECT_THAT(page.out, HasSubstr(words));
  }
  EXPECT_THAT(run_command("man").out, HasSubstr("Measure steps"));
  for (const char* topic : {"", "run", "verify", "eval", "plan", "mesh", "bench", "info"}) {
    const std::string check =
        std::string("if command -v groff > /dev/null; then " CROSSDOCK_COMMAND " man ") + topic +
        " | groff -man -ww -z; fi";
    const CommandResult read = run_program("sh -c '" + check + "'");
    EXPECT_EQ(read.status, 0) << topic;
    EXPECT_THAT(read.err, IsEmpty()) << topic;
  }
}

TEST(Log, SaysWhatWasChosenAndWhyIfAsked) {
  const std::string run = " " CROSSDOCK_COMMAND " " + kSmallRun + "--tokens 4";
  const CommandResult silent = run_program("env -u CROSSDOCK_LOG" + run);
  EXPECT_EQ(silent.status, 0);
  EXPECT_THAT(silent.err, IsEmpty());
  const CommandResult info = run_program("env COLUMNS=500 CROSSDOCK_LOG=info" + run);
  EXPECT_EQ(info.status, 0);
  EXPECT_THAT(info.err,
              HasSubstr("crossdock: rank 0 of 2: ranks: 2, nodes: 1, communicator: threads\n"));
  EXPECT_THAT(info.err, HasSubstr("crossdock: rank 0 of 2: strategy direct: "));
  EXPECT_THAT(info.err, Not(HasSubstr("rank 1 of 2")));
  const CommandResult debug = run_program("env COLUMNS=500 CROSSDOCK_LOG=debug" + run);
  EXPECT_THAT(debug.err, HasSubstr("crossdock: rank 1 of 2: on node 0, with "));
  const CommandResult given =
      run_program("env COLUMNS=500 CROSSDOCK_LOG=info" + run + " --strategy alltoall");
  EXPECT_THAT(given.err, HasSubstr("strategy alltoall: as given\n"));
  const CommandResult wrong = run_program("env CROSSDOCK_LOG=loud" + run);
  EXPECT_EQ(wrong.status, 1);
  EXPECT_THAT(wrong.err, HasSubstr("CROSSDOCK_LOG must be info or debug, got \"loud\""));
}

}  // namespace
}  // namespace crossdock::cli
