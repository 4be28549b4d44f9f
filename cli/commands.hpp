#pragma once

#include <string>

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

}  // namespace crossdock::cli
