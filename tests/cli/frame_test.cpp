#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/cuda.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

nlohmann::json read_json(const std::string& arguments) {
  const CommandResult result = run_command(arguments);
  EXPECT_EQ(result.status, 0) << arguments << "\n" << result.err;
  return nlohmann::json::parse(result.out, nullptr, /*allow_exceptions=*/false);
}

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
  expect_bad_arguments({
      {"", "a command is required"},
      {"frobnicate", "\"frobnicate\""},
      {"--frobnicate", "--frobnicate"},
      {"eval", "CASE is required"},
      {"eval --frob case.json", "--frob"},
      {"eval one.json two.json", "two.json"},
      {"info extra", "extra"},
  });
}

TEST(Command, ReadsWholeNumbersAsDecimal) {
  const std::string run = "run --width 8 --inner 8 --experts 4 --top-k 2 --ranks 2 --no-check ";
  EXPECT_EQ(read_json(run + "--tokens-total 0100 --json")["tokens_total"], 100);
  EXPECT_EQ(read_json(run + "--tokens 0009 --json")["tokens_total"], 18);
  EXPECT_EQ(read_json(run + "--tokens 4 --seed 010 --json")["seed"], 10);
  const auto plan = read_json("plan --model mixtral-8x7b --tokens 0100 --nodes 010 --json");
  EXPECT_EQ(plan["job"]["tokens_per_rank"], 100);
  EXPECT_EQ(plan["job"]["nodes"], 10);
  EXPECT_EQ(read_json("plan --model mixtral-8x7b --tokens 8 --zipf 010 --json")["job"]["zipf"], 10);
  const auto verified = read_json(
      "verify --ranks 01,0002 --case vector --strategy direct --communicator threads --json");
  EXPECT_EQ(verified["results"][1]["ranks"], 2);
  expect_bad_arguments({
      {"run --tokens 0x10", "--tokens must be a whole number, got \"0x10\""},
      {"plan --zipf 0x10", "--zipf must be a number, got \"0x10\""},
  });
}

TEST(Command, SaysThatAnOptionWasGivenTwice) {
  expect_bad_arguments({
      {"run --ranks 2 --ranks 3", "--ranks must be given once, not 2 times"},
      {"run --preset mixtral-8x7b --model mixtral-8x7b", "--preset must be given once"},
      {"plan --fabric ethernet --fabric ethernet --fabric efa", "--fabric must be given once"},
      {"bench --device cpu --device cpu", "--device must be given once"},
      {"run --ranks", "--ranks needs a value"},
      {"bench --scenario", "--scenario needs a value"},
  });
}

// An empty variable counts as not set.
TEST(Command, ReadsVariablesStrictly) {
  const std::string run =
      " " CROSSDOCK_COMMAND
      " run --width 8 --inner 8 --experts 4 --top-k 2 --ranks 2 --tokens 4 --steps 1 --no-check";
  for (const char* variable :
       {"CROSSDOCK_ARRIVAL_DEADLINE", "CROSSDOCK_PROGRESS_DEADLINE", "CROSSDOCK_THREADS"}) {
    const std::string name = std::string("env ") + variable + "=";
    EXPECT_EQ(run_program(name + run).status, 0) << variable;
    for (const char* value : {"0x10", "\" 5\"", "+5"}) {
      const CommandResult result = run_program(name + value + run);
      EXPECT_EQ(result.status, 1) << variable << "=" << value;
      EXPECT_THAT(result.err, HasSubstr(variable));
    }
  }
}

TEST(Command, FailsWhereItsOutputCannotBeWritten) {
  const std::vector<std::string> known = {
      "--help",
      "info",
      "plan --model mixtral-8x7b --tokens 8",
      "mesh --world 4",
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
  EXPECT_EQ(json["gpus"].size(), static_cast<size_t>(cuda_device_count()));
  for (const auto& part : json["parts"]) {
    EXPECT_FALSE(part["note"].get<std::string>().empty());
    if (part["name"] != "cuda") continue;
    EXPECT_EQ(part["works"], cuda_device_count() > 0);
  }
}

}  // namespace
}  // namespace crossdock::cli
