// How processes end: normally, early, killed. Starts jobs of three ranks under mpirun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <string>

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Job {
  int exit_code = -1;
  std::string output;
};

/// CROSSDOCK_MPIRUN and CROSSDOCK_MPI_PROCESS come from the build. Deadlines that expire in a job
/// are short, the others ample: survivors wait at exit for a rank that ended silently.
Job run_job(const std::string& arguments, const std::string& mpirun_options = "") {
  const bool is_late = arguments == "stall" || arguments == "absent";
  const bool is_missing = is_late || arguments == "kill" || arguments == "throw";
  const std::string command =
      "CROSSDOCK_PROGRESS_DEADLINE=" + std::string(is_missing ? "3" : "60") +
      " CROSSDOCK_ARRIVAL_DEADLINE=" + std::string(is_late ? "3" : "60") +
      " timeout 600 " CROSSDOCK_MPIRUN
      " --allow-run-as-root --oversubscribe "
      "--mca btl_tcp_if_include lo " +
      mpirun_options + " -np 3 " CROSSDOCK_MPI_PROCESS " " + arguments + " 2>&1";
  Job job;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return job;
  char buffer[4096];
  while (const size_t length = fread(buffer, 1, sizeof buffer, pipe)) {
    job.output.append(buffer, length);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) job.exit_code = WEXITSTATUS(status);
  return job;
}

TEST(MpiProcess, HealthyJobsEndWithoutAWord) {
  const Job job = run_job("none");
  EXPECT_EQ(job.exit_code, 0) << job.output;
  for (const char* line : {"rank 0 is done\n", "rank 1 is done\n", "rank 2 is done\n"}) {
    EXPECT_THAT(job.output, HasSubstr(line));
  }
  EXPECT_EQ(job.output.size(), 3 * std::string("rank 0 is done\n").size()) << job.output;
}

TEST(MpiProcess, TheExitCodeIsTheCallers) {
  EXPECT_EQ(run_job("none 7").exit_code, 7);
}

TEST(MpiProcess, ARankThatReturnsFromMainIsNamedAndTheJobEnds) {
  const Job job = run_job("return");
  EXPECT_EQ(job.exit_code, 0) << job.output;
  for (const char* rank : {"rank 0", "rank 2"}) {
    EXPECT_THAT(job.output, HasSubstr(std::string(rank) + " blames 1 at combine 3 at once"));
  }
  EXPECT_THAT(job.output,
              HasSubstr("left the group (it returned or was destroyed) before combine"));
}

TEST(MpiProcess, ARankThatExitsWithItsGroupAliveIsNamed) {
  const Job job = run_job("exit");
  EXPECT_EQ(job.exit_code, 0) << job.output;
  for (const char* rank : {"rank 0", "rank 2"}) {
    EXPECT_THAT(job.output, HasSubstr(std::string(rank) + " blames 1 at combine 3 at once"));
  }
  EXPECT_THAT(job.output, HasSubstr("left the group (its process is exiting) before combine"));
}

TEST(MpiProcess, AKilledRankIsNamedAndTheSurvivorsGoOn) {
  const Job job = run_job("kill", "--enable-recovery");
  for (const char* rank : {"rank 0", "rank 2"}) {
    EXPECT_THAT(job.output, AllOf(HasSubstr(std::string(rank) + " blames 1 at combine 3 at once"),
                                  HasSubstr(std::string(rank) + " goes on")));
  }
  EXPECT_THAT(job.output, HasSubstr("has ended) before combine (call 3)"));
}

TEST(MpiProcess, AStalledRankIsNamedAndNobodyHangsAtExit) {
  const Job job = run_job("stall", "--enable-recovery");
  EXPECT_NE(job.exit_code, 124) << job.output;  // the limit of the test
  for (const char* rank : {"rank 0", "rank 2"}) {
    EXPECT_THAT(job.output,
                HasSubstr(std::string(rank) + " blames 1 at combine 3 after a deadline"));
  }
}

TEST(MpiProcess, ASubgroupThatARankDoesNotComeToIsGivenUp) {
  const Job job = run_job("absent", "--enable-recovery");
  EXPECT_NE(job.exit_code, 124) << job.output;  // the limit of the test
  for (const char* process : {"process 0", "process 2"}) {
    EXPECT_THAT(job.output, HasSubstr(std::string(process) +
                                      " of 3: waited 3 s for 3 processes to make a subgroup"));
  }
}

TEST(MpiProcess, AnUncaughtExceptionIsNamed) {
  const Job job = run_job("throw", "--enable-recovery");
  for (const char* rank : {"rank 0", "rank 2"}) {
    EXPECT_THAT(job.output, HasSubstr(std::string(rank) + " blames 1 at combine 3 at once"));
  }
}

}  // namespace
