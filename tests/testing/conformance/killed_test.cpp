#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/testing/faults.hpp"

namespace crossdock::conformance {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

std::string output_of(const std::string& line) {
  std::string output;
  FILE* pipe = popen(line.c_str(), "r");
  std::array<char, 4096> chunk{};
  while (const size_t got = fread(chunk.data(), 1, chunk.size(), pipe)) {
    output.append(chunk.data(), got);
  }
  pclose(pipe);
  return output;
}

// Number of running processes of the job with this word in its environment; other jobs may be
// running on the machine.
int num_processes_with(const std::string& word) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "environ");
    const std::string environment(std::istreambuf_iterator<char>(file), {});
    if (environment.find(word) != std::string::npos) ++count;
  }
  return count;
}

// Gives processes that are about to end some time.
bool all_processes_end_with(const std::string& word) {
  for (int i = 0; i < 600 && num_processes_with(word) > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return num_processes_with(word) == 0;
}

// A shared memory folder for this job only, to see what it leaves behind. Windows and events have
// no names there; MPI's own segments do.
class SharedMemoryFolder {
 public:
  SharedMemoryFolder() : path_("/dev/shm/killed_test_" + std::to_string(getpid())) {
    std::filesystem::create_directory(path_);
  }
  ~SharedMemoryFolder() { std::filesystem::remove_all(path_); }
  SharedMemoryFolder(const SharedMemoryFolder&) = delete;
  SharedMemoryFolder& operator=(const SharedMemoryFolder&) = delete;

  const std::string& path() const { return path_; }
  bool is_empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

class Killed : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(Killed, IsNamedByAllSurvivorsWhoGoOn) {
  const auto& [strategy, step] = GetParam();
  const std::string report = testing::TempDir() + "killed_" + strategy + std::to_string(step);
  std::filesystem::remove(report);
  const SharedMemoryFolder shared_memory;
  const std::string output =
      // The deadline limits the wait at exit for the missing rank.
      output_of("CROSSDOCK_REPORT=" + report +
                " OMPI_MCA_btl_vader_backing_directory=" + shared_memory.path() +
                " CROSSDOCK_PROGRESS_DEADLINE=3 timeout 600 " CROSSDOCK_MPIRUN
                " --allow-run-as-root --oversubscribe --enable-recovery --mca btl_tcp_if_include "
                "lo -np 4 " CROSSDOCK_KILLED_RANK " " +
                strategy + " " + std::to_string(step) + " 2>/dev/null");
  for (const int survivor : {0, 1, 3}) {
    EXPECT_THAT(output, HasSubstr("survivor " + std::to_string(survivor) + "\n"));
  }
  // The report has one line per rank, even for the rank that could not write it, unless that rank
  // never met the others.
  const std::string lines = output_of("cat " + report);
  for (const int rank : {0, 1, 3}) {
    EXPECT_THAT(lines, HasSubstr("{\"rank\":" + std::to_string(rank) + ","));
  }
  const bool has_met_others = step > static_cast<int>(FaultStep::kBeforeCounts);
  if (has_met_others) {
    EXPECT_THAT(lines, ContainsRegex("\"rank\":2,.*\"written_by\":[013],\"events\":\\[\\{"));
  }
  std::filesystem::remove(report);
  EXPECT_TRUE(shared_memory.is_empty());
  EXPECT_TRUE(all_processes_end_with(shared_memory.path())) << "a process stayed behind";
}

// Every step of the strategies that differ most, the middle of the exchanges of the others.
std::vector<std::tuple<std::string, int>> cases() {
  std::vector<std::tuple<std::string, int>> result;
  for (const FaultCase& fault : list_faults(strategy_names(), 2)) {
    const bool differs = fault.strategy == "alltoall" || fault.strategy == "direct";
    const bool is_exchange =
        fault.step == FaultStep::kMidDispatch || fault.step == FaultStep::kMidCombine;
    if (fault.kind == FaultKind::kKilled && (differs || is_exchange)) {
      result.emplace_back(fault.strategy, static_cast<int>(fault.step));
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(AtEveryStep, Killed, testing::ValuesIn(cases()), [](const auto& info) {
  return std::get<0>(info.param) + "_" +
         std::string(kFaultStepNames[static_cast<size_t>(std::get<1>(info.param))]);
});

}  // namespace
}  // namespace crossdock::conformance
