#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/threads.hpp"

namespace crossdock {

inline ThreadOptions short_deadlines() {
  return {.ranks_per_node = 0,
          .group = {.arrival_deadline = std::chrono::seconds(20),
                    .progress_deadline = std::chrono::seconds(20)}};
}

/// The inputs of all ranks, in the reference's form. Values are small integers, unique per (rank,
/// token) in their first column and exact in every dtype; weights are sixteenths.
struct DispatchCase {
  DispatchConfig config;
  std::vector<reference::RankInput> ranks;  // [P]
};

inline reference::RankInput random_rank(const DispatchConfig& config, int rank, int64_t T,
                                        std::mt19937& random) {
  reference::RankInput input;
  input.T = T;
  std::uniform_int_distribution<int64_t> any_expert(-1, config.num_experts - 1);
  std::uniform_int_distribution<int> any_value(-8, 8);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t d = 0; d < config.width; ++d) {
      input.x.push_back(d == 0 ? static_cast<double>(int64_t{16} * rank + t % 16)
                               : any_value(random));
      input.grad_out.push_back(any_value(random));
    }
    std::vector<int64_t> ids;
    for (int64_t k = 0; k < config.top_k; ++k) {
      const int64_t id = any_expert(random);
      const bool repeated = std::find(ids.begin(), ids.end(), id) != ids.end();
      ids.push_back(repeated ? -1 : id);
      input.weights.push_back(any_value(random) / 16.0);
    }
    input.expert_ids.insert(input.expert_ids.end(), ids.begin(), ids.end());
    input.mask.push_back(t % 7 == 3 ? 1 : 0);
  }
  return input;
}

inline DispatchCase random_case(DispatchConfig config, const std::vector<int64_t>& tokens_per_rank,
                                unsigned seed) {
  std::mt19937 random(seed);
  DispatchCase result{.config = std::move(config), .ranks = {}};
  for (size_t rank = 0; rank < tokens_per_rank.size(); ++rank) {
    result.ranks.push_back(
        random_rank(result.config, static_cast<int>(rank), tokens_per_rank[rank], random));
  }
  return result;
}

/// The tensors that a test passes to the dispatcher of one rank.
struct RankTensors {
  OwnedTensor x;
  OwnedTensor grad_out;
  OwnedTensor expert_ids;
  OwnedTensor weights;
  OwnedTensor mask;

  Routing routing() const {
    return {.expert_ids = expert_ids.view, .weights = weights.view, .mask = mask.view};
  }
};

inline RankTensors tensors_of(const DispatchConfig& config, const reference::RankInput& input,
                              DType dtype) {
  using reference::to_tensor;
  const std::vector<double> ids(input.expert_ids.begin(), input.expert_ids.end());
  const std::vector<double> mask(input.mask.begin(), input.mask.end());
  return {.x = to_tensor(dtype, {input.T, config.width}, input.x),
          .grad_out = to_tensor(dtype, {input.T, config.width}, input.grad_out),
          .expert_ids = to_tensor(DType::kI32, {input.T, config.top_k}, ids),
          .weights = to_tensor(dtype == DType::kF64 ? DType::kF64 : DType::kF32,
                               {input.T, config.top_k}, input.weights),
          .mask = to_tensor(DType::kBool, {input.T}, mask)};
}

}  // namespace crossdock
