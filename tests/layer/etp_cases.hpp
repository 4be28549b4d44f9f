#pragma once

#include <string>
#include <vector>

#include "layer/layer_cases.hpp"

namespace crossdock {

/// The cases of list_layer_cases for `num_ranks` = etp * ep ranks, and cases with unusual routes.
inline std::vector<NamedCase> list_etp_cases(int num_ranks, int64_t etp) {
  std::vector<NamedCase> cases = list_layer_cases(num_ranks / static_cast<int>(etp));
  std::vector<int64_t> uneven;  // the second rank has no token
  for (int rank = 0; rank < num_ranks; ++rank) uneven.push_back(rank % 3 == 1 ? 0 : 3 + rank);
  for (NamedCase& named : cases) {
    named.options.tokens_per_rank = uneven;
    named.options.config.etp = etp;
  }
  return cases;
}

inline LayerCase with_forced_ids(LayerCase layer_case, const std::vector<int64_t>& pattern) {
  const int64_t T = first_token(layer_case, layer_case.num_ranks());
  for (int64_t i = 0; i < T * layer_case.config.router.top_k; ++i) {
    layer_case.forced_ids.push_back(pattern[static_cast<size_t>(i) % pattern.size()]);
  }
  return layer_case;
}

/// One expert takes all routes of the first slot; others have none.
inline LayerCase one_expert_takes_all(LayerCase layer_case) {
  return with_forced_ids(std::move(layer_case), {3, -1});
}

/// Tokens with two, one and no routes.
inline LayerCase with_unused_slots(LayerCase layer_case) {
  return with_forced_ids(std::move(layer_case), {2, 5, -1, 0, 4, -1, -1, -1});
}

}  // namespace crossdock
