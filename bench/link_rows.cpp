#include "bench/link_rows.hpp"

#include <algorithm>

#include "crossdock/testing/reference.hpp"

namespace crossdock::bench {

int64_t LinkRows::most_one_way() const {
  return std::max(*std::ranges::max_element(sent), *std::ranges::max_element(received));
}

int64_t LinkRows::most_there_and_back() const {
  int64_t most = 0;
  for (size_t gpu = 0; gpu < sent.size(); ++gpu) most = std::max(most, sent[gpu] + received[gpu]);
  return most;
}

LinkRows count_link_rows(const Workload& workload, int num_gpus) {
  const int num_ranks = workload.scenario().ranks;
  const std::vector<int32_t> owners = reference::owners_of(workload.dispatch_config(), num_ranks);
  const auto count = static_cast<size_t>(num_gpus);
  LinkRows rows{.sent = std::vector<int64_t>(count), .received = std::vector<int64_t>(count)};
  for (int rank = 0; rank < num_ranks; ++rank) {
    const size_t from = static_cast<size_t>(rank) % count;
    for (const int32_t expert : workload.expert_ids(rank)) {
      const size_t to = static_cast<size_t>(owners[static_cast<size_t>(expert)]) % count;
      if (from == to) continue;
      ++rows.sent[from];
      ++rows.received[to];
    }
  }
  return rows;
}

}  // namespace crossdock::bench
