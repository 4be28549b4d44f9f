#pragma once

#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "examples/09_train/trainer.hpp"

namespace crossdock {

/// A training and the mesh it runs on.
struct TrainingCase {
  std::string name;
  train::TrainConfig config;
};

/// Meshes of 4 ranks that together use every kind of parallelism and every layout of tokens. 20
/// steps in fp64.
std::vector<TrainingCase> cases_of_four_ranks();

/// Empty if a training equals that on one rank, as far as sums in another order allow; otherwise
/// the difference. The training on one rank is computed once per process and configuration.
std::string difference_from_one_rank(const train::TrainResult& result,
                                     const train::TrainConfig& config);

}  // namespace crossdock
