#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

TEST(Trace, HasATrackPerRankWithNestedEventsOfEveryStep) {
  const std::string file = testing::TempDir() + "trace_" + std::to_string(getpid()) + ".json";
  const CommandResult result = run_command(
      "run --ranks 3 --width 16 --inner 16 --experts 6 --top-k 2 --tokens 20 --steps 2 --trace " +
      file);
  ASSERT_EQ(result.status, 0) << result.err;
  std::ifstream in(file);
  const json trace = json::parse(in, nullptr, false);
  ASSERT_TRUE(trace.contains("traceEvents"));
  std::set<std::string> tracks;
  std::map<int, int> dispatches;            // by track
  std::map<int, std::vector<double>> ends;  // of open events, by track
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "M") {
      tracks.insert(event["args"]["name"].get<std::string>());
      continue;
    }
    const int track = event["tid"];
    const double begin = event["ts"];
    const double end = begin + event["dur"].get<double>();
    dispatches[track] += event["name"] == "dispatch" ? 1 : 0;
    std::vector<double>& open = ends[track];
    while (!open.empty() && open.back() <= begin + 1e-3) open.pop_back();
    EXPECT_TRUE(open.empty() || end <= open.back() + 1e-3) << event;
    open.push_back(end);
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(tracks.contains("rank " + std::to_string(rank)));
    EXPECT_EQ(dispatches[3 * rank], 4) << "forward and backward of two steps";
  }
  std::remove(file.c_str());
}

TEST(Trace, ShowsExpertsAtWorkWhileAChunkOfTheirRankTravels) {
  const std::string file = testing::TempDir() + "overlap_" + std::to_string(getpid()) + ".json";
  const CommandResult result = run_command(
      "run --ranks 2 --strategy direct --width 256 --inner 256 --experts 16 --top-k 4 "
      "--tokens 1024 --steps 3 --overlap 4 --no-check --json --trace " +
      file);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(json::parse(result.out, nullptr, false)["overlap"], 4);
  std::ifstream in(file);
  const json trace = json::parse(in, nullptr, false);
  struct Span {
    int rank;
    double begin, end;
  };
  std::vector<Span> chunks;
  std::vector<Span> experts;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "M") continue;
    const double begin = event["ts"];
    const Span span{event["tid"].get<int>() / 3, begin, begin + event["dur"].get<double>()};
    if (event["name"] == "dispatch chunk") chunks.push_back(span);
    if (event["cat"] == "experts" || event["cat"] == "experts_dx") experts.push_back(span);
  }
  EXPECT_EQ(chunks.size(), 48) << "4 chunks forward and backward, 3 steps, 2 ranks";
  EXPECT_EQ(experts.size(), 48);
  int overlaps = 0;
  for (const Span& chunk : chunks) {
    for (const Span& work : experts) {
      const bool overlap = work.begin < chunk.end && chunk.begin < work.end;
      overlaps += chunk.rank == work.rank && overlap ? 1 : 0;
    }
  }
  EXPECT_GT(overlaps, 0);
  std::remove(file.c_str());
}

// A small run with a trace, in its own folder.
class TraceFile : public testing::Test {
 protected:
  TraceFile() { std::filesystem::create_directory(folder_); }
  ~TraceFile() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  static std::string run_to(const std::string& file) {
    return "run --ranks 1 --width 8 --inner 8 --experts 2 --top-k 1 --tokens 2 --trace " + file;
  }
  static std::string text_of(const std::string& file) {
    std::ifstream in(file);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  static bool is_trace(const std::string& file) {
    return json::parse(text_of(file), nullptr, false).contains("traceEvents");
  }
  int num_entries() const {
    const std::filesystem::directory_iterator entries(folder_);
    return static_cast<int>(std::distance(begin(entries), end(entries)));
  }

 private:
  std::string folder_ = testing::TempDir() + "trace_file_" + std::to_string(getpid());
};

TEST_F(TraceFile, IsNamedInTheReport) {
  const std::string file = path("trace.json");
  EXPECT_THAT(run_command(run_to(file)).out, HasSubstr(file + ": all 3 steps"));
  const json report = json::parse(run_command(run_to(file) + " --json").out, nullptr, false);
  EXPECT_EQ(report["trace"]["file"], file);
  EXPECT_EQ(report["trace"]["steps"], 3);
  EXPECT_EQ(report["trace"]["steps_lost"], 0);
}

TEST_F(TraceFile, ReplacesARegularFileAndTouchesNoOther) {
  std::ofstream(path("trace.json")) << "old";
  std::ofstream(path("trace.json.part")) << "of somebody else";
  std::filesystem::permissions(
      path("trace.json"), std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  ASSERT_EQ(run_command(run_to(path("trace.json"))).status, 0);
  EXPECT_TRUE(is_trace(path("trace.json")));
  EXPECT_EQ(std::filesystem::status(path("trace.json")).permissions(),
            std::filesystem::perms(0600));
  EXPECT_EQ(text_of(path("trace.json.part")), "of somebody else");
  EXPECT_EQ(num_entries(), 2);
}

TEST_F(TraceFile, IsWrittenThroughASymbolicLink) {
  std::ofstream(path("target")) << "old";
  std::filesystem::create_symlink("target", path("link"));
  std::filesystem::create_symlink("made", path("dangling"));
  for (const auto& [link, target] : {std::pair{"link", "target"}, std::pair{"dangling", "made"}}) {
    const CommandResult result = run_command(run_to(path(link)));
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_TRUE(std::filesystem::is_symlink(path(link)));
    EXPECT_TRUE(is_trace(path(target))) << target;
  }
  EXPECT_EQ(num_entries(), 4);
}

TEST_F(TraceFile, IsWrittenIntoAPipe) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  const CommandResult result =
      run_program("sh -c 'timeout 100 cat " + path("pipe") + " > " + path("read") +
                  " & timeout 100 " CROSSDOCK_COMMAND " " + run_to(path("pipe")) + "; wait'");
  EXPECT_TRUE(std::filesystem::is_fifo(path("pipe")));
  EXPECT_TRUE(is_trace(path("read"))) << result.err;
}

TEST_F(TraceFile, IntoAPipeThatNobodyReadsIsAnError) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  const std::string run = "timeout 100 " CROSSDOCK_COMMAND " " + run_to(path("pipe"));
  const CommandResult without_reader = run_program(run);
  EXPECT_EQ(without_reader.status, 1);
  EXPECT_THAT(without_reader.err, HasSubstr("no process has opened the pipe to read it"));
  const std::string more_than_fits = run + " --steps 100";
  const CommandResult without_reading =
      run_program("sh -c 'sleep 100 < " + path("pipe") + " & " + more_than_fits +
                  "; status=$?; kill $!; exit $status'");
  EXPECT_EQ(without_reading.status, 1);
  EXPECT_THAT(without_reading.err, HasSubstr("does not read it"));
}

TEST_F(TraceFile, MustHaveAName) {
  expect_bad_arguments({{"run --trace \"\"", "--trace must not be empty"}});
}

TEST_F(TraceFile, LeavesADeviceADevice) {
  const std::string device = path("null");  // not the real /dev/null, which a bug would destroy
  if (mknod(device.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0 ||
      !std::ofstream(device).put('x').flush()) {
    GTEST_SKIP() << "devices cannot be made, or used, here";
  }
  const CommandResult result = run_command(run_to(device));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_TRUE(std::filesystem::is_character_file(device));
}

TEST_F(TraceFile, GoesToStandardOutputWhereThatIsAFile) {
  const CommandResult result = run_command(run_to("/proc/self/fd/1") + " > " + path("out"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(text_of(path("out")), HasSubstr("traceEvents"));
  EXPECT_THAT(text_of(path("out")), HasSubstr("checksum"));
}

TEST_F(TraceFile, BeyondTheLimitOnFileSizesIsAClearError) {
  const CommandResult result = run_program("sh -c 'ulimit -f 1; exec " CROSSDOCK_COMMAND " " +
                                           run_to(path("trace.json")) + "'");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("File too large"));
  EXPECT_EQ(num_entries(), 0);
}

TEST_F(TraceFile, HasEveryStepOfALongRun) {
  const std::string file = path("trace.json");
  ASSERT_EQ(run_command(run_to(file) + " --steps 800 --no-check").status, 0);
  const json trace = json::parse(text_of(file), nullptr, false);
  int num_plans = 0;
  for (const json& event : trace["traceEvents"]) num_plans += event["name"] == "plan" ? 1 : 0;
  EXPECT_EQ(num_plans, 800);
  EXPECT_EQ(trace["otherData"]["steps"], 800);
  EXPECT_EQ(trace["otherData"]["steps_lost"], 0);
}

TEST_F(TraceFile, SaysWhichStepsDidNotFit) {
  const std::string file = path("trace.json");
  const CommandResult result =
      run_command(run_to(file) + " --steps 2500 --overlap 2 --no-check --json");
  const json report = json::parse(result.out, nullptr, false)["trace"];
  const int64_t num_lost = report["steps_lost"];
  EXPECT_GT(num_lost, 0);
  EXPECT_EQ(report["steps"], 2500 - num_lost);
  const json trace = json::parse(text_of(file), nullptr, false);
  int64_t num_plans = 0;
  for (const json& event : trace["traceEvents"]) num_plans += event["name"] == "plan" ? 1 : 0;
  EXPECT_EQ(num_plans, report["steps"]);
  EXPECT_EQ(trace["otherData"]["steps_lost"], num_lost);
  EXPECT_EQ(trace["otherData"]["first_step"], num_lost + 1);
}

TEST(Trace, AnUnwritableFileIsAClearError) {
  const CommandResult result = run_command(
      "run --ranks 2 --width 16 --inner 16 --experts 4 --top-k 2 --tokens 8 --steps 1 "
      "--trace /no/such/folder/trace.json");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("cannot write the trace to /no/such/folder/trace.json"));
}

TEST(VerifyFaults, PrintsTheMatrixWithLatencies) {
  const CommandResult result = run_command(
      "verify --faults --communicator threads --strategy direct --case throws/mid --json");
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const json matrix = json::parse(result.out, nullptr, false);
  ASSERT_EQ(matrix.size(), 4u);
  for (const json& entry : matrix) {
    EXPECT_TRUE(entry["passed"]);
    EXPECT_GT(entry["latency_ms"].get<double>(), 0);
    EXPECT_THAT(entry["message"].get<std::string>(), HasSubstr("rank 2"));
  }
}

TEST(VerifyFaults, RanksAreKilledWhereTheyAreProcesses) {
  if (!mpi_is_built()) GTEST_SKIP() << "built without MPI";
  const CommandResult result = run_command(
      "verify --faults --communicator mpi --strategy direct --case killed/mid_dispatch --json");
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const json matrix = json::parse(result.out, nullptr, false);
  ASSERT_EQ(matrix.size(), 2u);
  EXPECT_EQ(matrix[0]["case"], "direct/killed/mid_dispatch");
  EXPECT_EQ(matrix[1]["case"], "direct/killed/mid_dispatch_backward");
  for (const json& entry : matrix) {
    EXPECT_TRUE(entry["passed"]) << entry;
    EXPECT_THAT(entry["message"].get<std::string>(), HasSubstr("rank 2"));
  }
}

TEST(VerifyFaults, AnUnknownCaseIsRefused) {
  const CommandResult result = run_command("verify --faults --case no_such_case");
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("no fault matches"));
}

}  // namespace
}  // namespace crossdock::cli
