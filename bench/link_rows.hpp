#pragma once

#include <cstdint>
#include <vector>

#include "bench/workload.hpp"

namespace crossdock::bench {

/// Rows of a dispatch whose token and expert are on different GPUs.
struct LinkRows {
  std::vector<int64_t> sent;      // [GPUs]
  std::vector<int64_t> received;  // [GPUs]

  /// The most rows that a GPU sends or receives in one movement.
  int64_t most_one_way() const;
};

/// The most rows that a GPU sends or receives in a movement there and one back.
int64_t most_there_and_back(const LinkRows& there, const LinkRows& back);

/// Rank r is on GPU r mod num_gpus. copies: kPerRoute, as in a combine; kPerRank; or what kAuto
/// means for ranks on these GPUs.
LinkRows count_link_rows(const Workload& workload, int num_gpus, Copies copies);

}  // namespace crossdock::bench
