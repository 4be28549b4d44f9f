#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossdock::bench {

/// Times of one step over all repetitions. A repetition lasts from the first rank's start to the
/// last rank's end.
struct StepResult {
  std::string name;
  double median_us = 0.0;
  double min_us = 0.0;
  double max_us = 0.0;
  double p10_us = 0.0;  // percentiles, interpolated
  double p90_us = 0.0;
  int64_t bytes = 0;     // least that the step must read and write, over all ranks
  double copy_us = 0.0;  // parallel memcpy that reads and writes as many bytes; median
  /// Parallel loop that reads as much and writes as much as the step must; median. 0: unknown for
  /// this step.
  double traffic_us = 0.0;
  double gflops = 0.0;  // per second; 0 except for steps that are matrix products
  double flops = 0.0;   // least that the step must compute; on a GPU only
  /// The longer of the times that memory needs for the bytes and tensor cores for the flops; on a
  /// GPU only.
  double floor_us = 0.0;
  int64_t link_bytes = 0;  // the most that a GPU sends to others, or receives from them

  double ratio() const { return copy_us > 0.0 ? median_us / copy_us : 0.0; }
  double traffic_ratio() const { return traffic_us > 0.0 ? median_us / traffic_us : 0.0; }
  /// Rate at which one GPU sends or receives, in GB/s.
  double link_rate() const { return static_cast<double>(link_bytes) / median_us * 1e-3; }
  double floor_ratio() const { return floor_us > 0.0 ? median_us / floor_us : 0.0; }
};

struct Result {
  std::string scenario;
  std::string strategy;      // "none" if no rows are moved
  std::string communicator;  // "none" for a single rank
  int ranks = 0;
  int64_t tokens = 0;
  int64_t width = 0;
  int64_t top_k = 0;
  int64_t experts = 0;
  int max_sms = 0;              // per rank on a GPU; 0: no limit
  std::string copies = "auto";  // DispatchConfig::copies
  int gpus = 0;                 // that the ranks share, rank r on GPU r mod gpus; 0: none
  /// Rate at which one GPU can send to the others while it receives as much, in GB/s, measured in
  /// the same run. 0 for one GPU.
  double link_rate = 0.0;
  std::string dtype;
  int repeat = 0;
  bool checked = false;  // the results were compared with the expected bits
  std::vector<StepResult> steps;
};

}  // namespace crossdock::bench
