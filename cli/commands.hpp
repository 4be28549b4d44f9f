#pragma once

#include <string>
#include <vector>

/// One function per command. Each returns the exit status: 0, or 1 for a failure it has reported.
/// Status 2 is for command-line arguments and belongs to main.cpp.
namespace crossdock::cli {

struct InfoArgs {
  bool json = false;
};
int run_info(const InfoArgs& args);

struct EvalArgs {
  std::string path;    // "-": standard input
  bool check = false;  // compare with the reference, say so on standard error
};
int run_eval(const EvalArgs& args);

struct BenchArgs {
  bool list = false;
  bool json = false;
  bool check = true;
  std::vector<std::string> scenarios{};      // empty: the default ones
  std::vector<std::string> strategies{};     // empty: all
  std::vector<std::string> communicators{};  // empty: all
  int ranks = 0;                             // 0: the scenario's
  int ranks_per_node = 0;                    // 0: as the engine reports
  int repeat = 7;
  int warm_up = 2;
};
int run_bench(const BenchArgs& args);

}  // namespace crossdock::cli
