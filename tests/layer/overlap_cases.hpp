#pragma once

#include <vector>

#include "layer/layer_cases.hpp"

namespace crossdock {

/// Numbers of chunks to try: few, and more than there are local experts.
inline constexpr int64_t kChunkCounts[] = {2, 3, 1000};

/// The layers of list_layer_cases, and one with more rows, in fp32 and bf16. Some ranks are empty,
/// some tokens are padding.
inline std::vector<NamedCase> list_overlap_cases(int num_ranks) {
  std::vector<NamedCase> cases = list_layer_cases(num_ranks);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    MoeLayerConfig config;
    config.router.num_experts = 19;  // not divisible by any number of ranks
    config.router.top_k = 3;
    config.router.width = 24;
    config.experts.inner = 40;
    config.experts.dtype = dtype;
    config.experts.weights_in = WeightsIn::kExperts;
    config.shared_inner = 8;
    std::vector<int64_t> tokens;
    for (int rank = 0; rank < num_ranks; ++rank) tokens.push_back(rank % 3 == 1 ? 0 : 40 + rank);
    cases.push_back({"rows_in_" + std::string(name_of(dtype)),
                     {.config = config, .tokens_per_rank = tokens, .biases = true, .mask = true}});
  }
  return cases;
}

}  // namespace crossdock
