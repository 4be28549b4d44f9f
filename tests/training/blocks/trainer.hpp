#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/group.hpp"
#include "crossdock/mesh.hpp"
#include "mistakes.hpp"
#include "model.hpp"
#include "text.hpp"
#include "tokens.hpp"
#include "whole_gradients.hpp"

namespace train {

/// Must be identical on every rank.
struct TrainConfig {
  crossdock::MeshShape mesh{};
  crossdock::DType dtype = crossdock::DType::kF64;  // or kF32
  ModelConfig model{};
  TextOptions text{};
  TokenOptions tokens{};
  int64_t steps = 20;
  double learning_rate = 0.5;
  double momentum = 0.0;
  Mistake mistake = Mistake::kNone;
};

/// The report on a step, identical on every rank except num_local_tokens.
struct StepReport {
  int64_t step = 0;  // from 0
  double text_loss = 0.0;
  double router_loss = 0.0;
  double grad_norm = 0.0;
  int64_t num_tokens = 0;
  int64_t num_local_tokens = 0;  // on this rank, with padding
  double imbalance = 1.0;

  double loss() const { return text_loss + router_loss; }
};

struct TrainResult {
  std::vector<StepReport> steps;
  WholeTensors first_gradients;  // of the first step, summed over the mesh
};

/// Called after every step.
using Progress = std::function<void(const StepReport&)>;

/// Trains the model. Collective over `world`; the result is identical on every rank.
TrainResult train(crossdock::Group& world, const TrainConfig& config,
                  const Progress& progress = {});

/// The same on a single rank in this process, with which every mesh is compared.
TrainResult train_on_one_rank(TrainConfig config);

}  // namespace train
