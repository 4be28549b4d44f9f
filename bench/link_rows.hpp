#pragma once

#include <cstdint>
#include <vector>

#include "bench/workload.hpp"

namespace crossdock::bench {

/// Rows of a dispatch whose token and expert are on different GPUs. A combine moves as many back.
struct LinkRows {
  std::vector<int64_t> sent;      // [GPUs]
  std::vector<int64_t> received;  // [GPUs]

  /// The most rows that a GPU sends or receives in one movement.
  int64_t most_one_way() const;
  /// The most rows that a GPU sends in a movement there and one back, and as many that it receives.
  int64_t most_there_and_back() const;
};

/// Rank r is on GPU r mod num_gpus.
LinkRows count_link_rows(const Workload& workload, int num_gpus);

}  // namespace crossdock::bench
