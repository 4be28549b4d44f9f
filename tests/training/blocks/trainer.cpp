#include "trainer.hpp"

#include <array>
#include <span>
#include <string>

#include "crossdock/error.hpp"
#include "crossdock/threads.hpp"
#include "parameter.hpp"

namespace train {
namespace {

using crossdock::Group;
using crossdock::Mesh;
using crossdock::MeshAxis;
using crossdock::TensorView;

// The gradients of all parameters, by how they must be summed.
template <typename Real>
class GradientLists {
 public:
  explicit GradientLists(const std::vector<Parameter<Real>*>& parameters) {
    for (Parameter<Real>* parameter : parameters) {
      views_[static_cast<size_t>(parameter->held)].push_back(parameter->grad_view());
    }
  }

  crossdock::MeshGradients lists() const {
    return {.experts = of(Held::kExperts),
            .experts_replicated = of(Held::kExpertsReplicated),
            .dense = of(Held::kDense),
            .replicated = of(Held::kReplicated)};
  }

 private:
  std::span<const TensorView> of(Held held) const { return views_[static_cast<size_t>(held)]; }

  std::array<std::vector<TensorView>, 4> views_;
};

template <typename Real>
class Trainer {
 public:
  Trainer(Group& world, const TrainConfig& config)
      : config_(config), mesh_(world, config.mesh), model_(mesh_, model_config(config)) {}

  StepReport step(int64_t number);
  WholeTensors gradients() { return gather_gradients(mesh_, model_); }

 private:
  static ModelConfig model_config(const TrainConfig& config) {
    ModelConfig model = config.model;
    model.replicated = config.tokens.replicated;
    model.mistake = config.mistake;
    return model;
  }

  BatchSize count(const std::vector<std::string>& sequences, const Tokens& tokens);
  LossShares sum(const LossShares& shares);
  void average_gradients();
  void update();

  // Whether other ranks count this rank's tokens as theirs.
  bool is_copy() const { return config_.tokens.replicated && mesh_.coordinates().tp > 0; }
  Group& stage() { return mesh_.group(MeshAxis::kTpCpDp); }  // all ranks that have tokens

  TrainConfig config_;
  Mesh mesh_;
  Model<Real> model_;
};

template <typename Real>
StepReport Trainer<Real>::step(int64_t number) {
  const std::vector<std::string> sequences = make_sequences(config_.text, number);
  const Tokens tokens = take_share(mesh_, sequences, config_.tokens, config_.mistake);
  const BatchSize batch = count(sequences, tokens);

  // This rank's tokens, with the parameters that it holds.
  const LossShares losses = sum(model_.forward(tokens, batch));
  const double imbalance = model_.imbalance();
  model_.backward(tokens);

  // Sums each gradient over the ranks that hold the parameter and have different tokens. The loss
  // is a mean over all tokens of the batch, so gradients are summed, not averaged.
  const GradientLists<Real> gradients(model_.parameters());
  crossdock::sum_gradients(mesh_, gradients.lists());
  if (config_.mistake == Mistake::kAveragedGradients) average_gradients();
  const double grad_norm = crossdock::global_grad_norm(mesh_, gradients.lists());
  update();
  return {.step = number,
          .text_loss = losses.text,
          .router_loss = losses.router,
          .grad_norm = grad_norm,
          .num_tokens = batch.num_tokens,
          .num_local_tokens = tokens.size(),
          .imbalance = imbalance};
}

template <typename Real>
BatchSize Trainer<Real>::count(const std::vector<std::string>& sequences, const Tokens& tokens) {
  std::array<int64_t, 2> counts{};  // tokens, targets
  for (size_t i = 0; i < tokens.bytes.size() && !is_copy(); ++i) {
    counts[0] += tokens.is_padding[i] == 0 ? 1 : 0;
    counts[1] += tokens.targets[i] >= 0 ? 1 : 0;
  }
  stage().all_reduce(TensorView(counts.data(), {2}));
  BatchSize batch{.num_tokens = counts[0], .num_targets = counts[1]};
  for (const std::string& sequence : sequences) batch.num_sequences += sequence.empty() ? 0 : 1;
  return batch;
}

template <typename Real>
LossShares Trainer<Real>::sum(const LossShares& shares) {
  std::array<double, 2> losses = {is_copy() ? 0.0 : shares.text, shares.router};
  stage().all_reduce(TensorView(losses.data(), {2}));
  return {.text = losses[0], .router = losses[1]};
}

// A deliberate mistake, see Mistake::kAveragedGradients.
template <typename Real>
void Trainer<Real>::average_gradients() {
  for (Parameter<Real>* parameter : model_.parameters()) {
    const bool is_expert =
        parameter->held == Held::kExperts || parameter->held == Held::kExpertsReplicated;
    const int64_t ranks = is_expert ? mesh_.shape().edp : mesh_.shape().cp * mesh_.shape().dp;
    for (Real& grad : parameter->grad) grad /= static_cast<Real>(ranks);
  }
}

template <typename Real>
void Trainer<Real>::update() {
  for (Parameter<Real>* parameter : model_.parameters()) {
    parameter->velocity.resize(parameter->value.size());
    for (size_t i = 0; i < parameter->value.size(); ++i) {
      Real& velocity = parameter->velocity[i];
      velocity = static_cast<Real>(config_.momentum) * velocity + parameter->grad[i];
      parameter->value[i] -= static_cast<Real>(config_.learning_rate) * velocity;
    }
  }
}

template <typename Real>
TrainResult train_as(Group& world, const TrainConfig& config, const Progress& progress) {
  Trainer<Real> trainer(world, config);
  TrainResult result;
  for (int64_t number = 0; number < config.steps; ++number) {
    result.steps.push_back(trainer.step(number));
    if (number == 0) result.first_gradients = trainer.gradients();
    if (progress) progress(result.steps.back());
  }
  return result;
}

}  // namespace

TrainResult train(Group& world, const TrainConfig& config, const Progress& progress) {
  if (config.dtype == crossdock::DType::kF64) return train_as<double>(world, config, progress);
  if (config.dtype == crossdock::DType::kF32) return train_as<float>(world, config, progress);
  throw crossdock::Error(
      crossdock::ErrorCode::kInvalidArgument,
      "dtype must be fp64 or fp32, got " + std::string(crossdock::name_of(config.dtype)));
}

TrainResult train_on_one_rank(TrainConfig config) {
  config.mesh = {.world = 1};
  config.mistake = Mistake::kNone;
  TrainResult result;
  crossdock::run_ranks(1, [&](Group& world) { result = train(world, config); });
  return result;
}

}  // namespace train
