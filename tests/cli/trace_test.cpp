#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
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
  EXPECT_THAT(result.err, HasSubstr("no fault fits"));
}

}  // namespace
}  // namespace crossdock::cli
