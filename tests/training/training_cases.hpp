#pragma once

#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "training/blocks/trainer.hpp"

namespace crossdock {

/// A training run and its mesh.
struct TrainingCase {
  std::string name;
  train::TrainConfig config;
};

/// Meshes of 4 ranks that together use every kind of parallelism and every layout of tokens. 20
/// steps in fp64.
std::vector<TrainingCase> cases_of_four_ranks();

/// Empty if a training run equals the one on one rank, up to the order of sums; otherwise the
/// difference. The run on one rank is computed once per process and configuration.
std::string difference_from_one_rank(const train::TrainResult& result,
                                     const train::TrainConfig& config);

}  // namespace crossdock
