// A layer on a mesh: after sum_gradients, every rank has the gradients of a single rank with all
// tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "crossdock/mesh.hpp"
#include "crossdock/threads.hpp"
#include "layer/layer_case.hpp"
#include "layer/layer_on_rank.hpp"

namespace crossdock {
namespace {

LayerCase case_of(std::vector<int64_t> tokens_per_rank) {
  MoeLayerConfig config;
  config.router.num_experts = 6;
  config.router.top_k = 2;
  config.router.width = 8;
  config.router.aux_loss_coeff = 0.01;
  config.router.z_loss_coeff = 0.001;
  config.experts.inner = 5;
  config.experts.dtype = DType::kF64;
  config.shared_inner = 4;
  return make_case(
      {.config = config, .tokens_per_rank = std::move(tokens_per_rank), .biases = true});
}

std::vector<TensorView> list_of(const ExpertGradients& gradients) {
  std::vector<TensorView> list = {gradients.w1, gradients.w2, gradients.b1, gradients.b2};
  std::erase_if(list, [](const TensorView& tensor) { return !tensor.given(); });
  return list;
}

/// Largest difference, relative to the largest value.
double difference(const std::vector<double>& got, const std::vector<double>& wanted) {
  EXPECT_EQ(got.size(), wanted.size());
  double largest = 0;
  double worst = 0;
  for (size_t i = 0; i < std::min(got.size(), wanted.size()); ++i) {
    largest = std::max(largest, std::abs(wanted[i]));
    worst = std::max(worst, std::abs(got[i] - wanted[i]));
  }
  return worst == 0 ? 0 : worst / largest;
}

void expect_equal(const RankResult& got, const RankResult& wanted) {
  constexpr double kTolerance = 1e-13;
  EXPECT_LE(difference(got.grad_gate, wanted.grad_gate), kTolerance);
  EXPECT_LE(difference(got.grad_gate_bias, wanted.grad_gate_bias), kTolerance);
  for (const MlpMember member : kMlpMembers) {
    EXPECT_LE(difference(got.shared.*member, wanted.shared.*member), kTolerance);
    for (size_t e = 0; e < got.experts.size(); ++e) {
      if ((got.experts[e].*member).empty()) continue;  // another rank's
      EXPECT_LE(difference(got.experts[e].*member, wanted.experts[e].*member), kTolerance);
    }
  }
}

double norm_of(const RankResult& result) {
  double squares = 0;
  const auto add = [&](const std::vector<double>& values) {
    for (const double value : values) squares += value * value;
  };
  add(result.grad_gate);
  add(result.grad_gate_bias);
  for (const MlpMember member : kMlpMembers) {
    add(result.shared.*member);
    for (const auto& expert : result.experts) add(expert.*member);
  }
  return std::sqrt(squares);
}

void expect_gradients_of_one_rank(const MeshShape& shape) {
  const MeshLayout layout(shape);
  const auto stage = static_cast<int>(layout.shape().world / layout.shape().pp);
  std::vector<int64_t> tokens;  // of the ranks of a stage; some have none
  for (int r = 0; r < stage; ++r) tokens.push_back((r * 5 + 4) % 7);
  const LayerCase on_mesh = case_of(tokens);
  const int64_t total = first_token(on_mesh, stage);
  const RankResult wanted = run_layer_on_threads(spread(on_mesh, {total}))[0];
  run_ranks(layout.num_ranks(), [&](Group& world) {
    Mesh mesh(world, shape);
    Group& rows = mesh.group(MeshAxis::kEtpEp);
    LayerOnRank one(rows, on_mesh, {.counting_group = &mesh.group(MeshAxis::kTpCpDp)}, 0.0,
                    world.rank() % stage);
    MoeForwardResult forward = one.forward();
    const OwnedTensor grad_x = one.backward(forward.saved);

    const MoeLayerGradients grads = one.parameters.grads();
    const std::vector<TensorView> experts = list_of(grads.experts);
    std::vector<TensorView> dense = list_of(grads.shared);
    dense.insert(dense.end(), {grads.gate, grads.gate_bias});
    const MeshGradients lists = {.experts = experts, .dense = dense};
    sum_gradients(mesh, lists);
    const RankResult got = one.result(forward, grad_x);
    expect_equal(got, wanted);
    // Every stage has a layer with the same gradients.
    const double stages = std::sqrt(static_cast<double>(mesh.shape().pp));
    EXPECT_NEAR(global_grad_norm(mesh, lists) / (stages * norm_of(wanted)), 1.0, 1e-13);
  });
}

TEST(MeshLayer, HasTheGradientsOfOneRank) {
  expect_gradients_of_one_rank({.world = 4, .ep = 4});
  expect_gradients_of_one_rank({.world = 4, .ep = 2});
  expect_gradients_of_one_rank({.tp = 2, .dp = 2, .ep = 4});
  expect_gradients_of_one_rank({.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 2});
}

}  // namespace
}  // namespace crossdock
