#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossdock::bench {

/// One step of a scenario over all repetitions. A repetition lasts from the first rank's begin to
/// the last rank's end.
struct StepResult {
  std::string name;
  double median_us = 0.0;
  double min_us = 0.0;
  double max_us = 0.0;
  int64_t bytes = 0;     // what the step must read and write at least, over all ranks
  double copy_us = 0.0;  // a plain parallel memcpy that reads and writes so many bytes; median
  /// A plain parallel loop that reads as much and writes as much as the step must; median. 0: not
  /// known of this step.
  double traffic_us = 0.0;
  double gflops = 0.0;  // of steps that are matrix products; else 0

  double ratio() const { return copy_us > 0.0 ? median_us / copy_us : 0.0; }
  double traffic_ratio() const { return traffic_us > 0.0 ? median_us / traffic_us : 0.0; }
};

struct Result {
  std::string scenario;
  std::string strategy;      // "none" where no rows move
  std::string communicator;  // "none" with one rank that exchanges nothing
  int ranks = 0;
  int64_t tokens = 0;
  int64_t width = 0;
  int64_t top_k = 0;
  int64_t experts = 0;
  int max_sms = 0;  // of each rank on a GPU; 0: all
  std::string dtype;
  int repeat = 0;
  bool checked = false;  // the results were compared with the expected bits
  std::vector<StepResult> steps;
};

}  // namespace crossdock::bench
