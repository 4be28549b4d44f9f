#include "bench/link_rows.hpp"

#include <algorithm>
#include <set>

#include "crossdock/testing/reference.hpp"

namespace crossdock::bench {

int64_t LinkRows::most_one_way() const {
  return std::max(*std::ranges::max_element(sent), *std::ranges::max_element(received));
}

int64_t most_there_and_back(const LinkRows& there, const LinkRows& back) {
  int64_t most = 0;
  for (size_t gpu = 0; gpu < there.sent.size(); ++gpu) {
    most = std::max(
        {most, there.sent[gpu] + back.received[gpu], there.received[gpu] + back.sent[gpu]});
  }
  return most;
}

LinkRows count_link_rows(const Workload& workload, int num_gpus, Copies copies) {
  const int num_ranks = workload.scenario().ranks;
  const auto top_k = static_cast<size_t>(workload.scenario().top_k);
  const std::vector<int32_t> owners = reference::owners_of(workload.dispatch_config(), num_ranks);
  const auto count = static_cast<size_t>(num_gpus);
  LinkRows rows{.sent = std::vector<int64_t>(count), .received = std::vector<int64_t>(count)};
  for (int rank = 0; rank < num_ranks; ++rank) {
    const size_t from = static_cast<size_t>(rank) % count;
    const auto& experts = workload.expert_ids(rank);
    std::set<int32_t> reached;  // by the current token
    for (size_t route = 0; route < experts.size(); ++route) {
      if (route % top_k == 0) reached.clear();
      const int32_t owner = owners[static_cast<size_t>(experts[route])];
      const bool is_repeated = !reached.insert(owner).second;
      const size_t to = static_cast<size_t>(owner) % count;
      if (from == to || (is_repeated && copies != Copies::kPerRoute)) continue;
      ++rows.sent[from];
      ++rows.received[to];
    }
  }
  return rows;
}

}  // namespace crossdock::bench
