// A layer on a GPU against the reference, and its bits.
#include <gtest/gtest.h>

#include "layer/cuda/layer_on_gpu.hpp"

namespace crossdock {
namespace {

class CudaLayer : public CudaTest {};

void expect_reference(const LayerCase& layer_case, double tolerance, const std::string& name,
                      const comm::GpuPretences& pretences = {}) {
  const std::vector<RankResult> wanted = run_reference(layer_case);
  const std::vector<RankResult> got = run_layer_on_gpu(layer_case, {}, pretences);
  for (size_t rank = 0; rank < got.size(); ++rank) {
    EXPECT_EQ(find_difference(got[rank], wanted[rank], tolerance), "")
        << name << ", rank " << rank << " of " << got.size();
  }
}

TEST_F(CudaLayer, EqualsTheReferenceForwardAndBackward) {
  for (const int P : {1, 2, 4}) {
    for (NamedCase& named : list_layer_cases(P)) {
      named.options.config.experts.dtype = DType::kF32;
      LayerCase layer_case = make_case(named.options);
      expect_reference(layer_case, 2e-5, named.name);
      layer_case.config.dispatch.max_rows = most_rows(layer_case);
      expect_reference(layer_case, 2e-5, named.name + " with max_rows");
    }
  }
}

TEST_F(CudaLayer, EqualsTheReferenceWithEveryStrategy) {
  for (const std::string& strategy : strategy_names()) {
    NamedCase named = list_layer_cases(4)[2];
    named.options.config.experts.dtype = DType::kF32;
    named.options.config.strategy = strategy;
    expect_reference(make_case(named.options), 2e-5, strategy);
  }
}

TEST_F(CudaLayer, EqualsTheReferenceOnGpusOutOfReach) {
  expect_reference(spread(medium_case(DType::kF32), {100, 0, 111}), 2e-5, "through host memory",
                   {.reaches_nobody = true});
}

TEST_F(CudaLayer, EqualsTheReferenceInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const double tolerance = dtype == DType::kBF16 ? 3e-2 : 4e-3;
    const LayerCase alone = medium_case(dtype);
    expect_reference(alone, tolerance, std::string(name_of(dtype)));
    expect_reference(spread(alone, {100, 0, 111}), tolerance, std::string(name_of(dtype)));
  }
}

TEST_F(CudaLayer, EveryActivation) {
  for (size_t i = 0; i < kActivationNames.size(); ++i) {
    LayerCase layer_case = medium_case(DType::kF32);
    layer_case.config.experts.activation = static_cast<Activation>(i);
    layer_case = make_case({.config = layer_case.config, .tokens_per_rank = {60}, .biases = true});
    expect_reference(layer_case, 2e-5, std::string(kActivationNames[i]));
  }
}

TEST_F(CudaLayer, WorksWithoutAnyToken) {
  NamedCase named = list_layer_cases(3)[2];
  named.options.config.experts.dtype = DType::kF32;
  named.options.tokens_per_rank.assign(3, 0);
  expect_reference(make_case(named.options), 2e-5, named.name);
}

TEST_F(CudaLayer, BitsDependNeitherOnRanksNorOnTheRun) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const LayerCase alone = medium_case(dtype);
    const std::vector<double> wanted = shared_bits(run_layer_on_gpu(alone));
    EXPECT_EQ(shared_bits(run_layer_on_gpu(alone)), wanted) << "a second run";
    for (const std::vector<int64_t>& tokens :
         std::vector<std::vector<int64_t>>{{100, 111}, {0, 60, 150, 1}}) {
      const std::vector<double> got = shared_bits(run_layer_on_gpu(spread(alone, tokens)));
      ASSERT_EQ(got.size(), wanted.size());
      EXPECT_EQ(reference::compare(got, wanted).num_different, 0)
          << name_of(dtype) << ", " << tokens.size() << " ranks";
    }
  }
}

// The sum that backward differentiates: <grad_out, out>, and all losses.
double objective(const LayerCase& layer_case) {
  double sum = 0.0;
  size_t i = 0;
  for (const RankResult& rank : run_layer_on_gpu(layer_case)) {
    for (const double value : rank.out) sum += value * layer_case.grad_out[i++];
    sum += rank.losses.aux + rank.losses.z;
  }
  return sum;
}

// Central differences in fp32: the step is a compromise between rounding and curvature.
TEST_F(CudaLayer, GradientsAreTheSlopesOfOutputsAndLosses) {
  NamedCase named = list_layer_cases(1)[2];
  named.options.config.experts.dtype = DType::kF32;
  LayerCase layer_case = make_case(named.options);
  const RankResult result = run_layer_on_gpu(layer_case)[0];
  const auto expect_slope = [&](double& value, double gradient, const char* name) {
    constexpr double kStep = 1.0 / 256;
    const double before = value;
    value = before + kStep;
    const double above = objective(layer_case);
    value = before - kStep;
    const double below = objective(layer_case);
    value = before;
    EXPECT_NEAR((above - below) / (2 * kStep), gradient, 5e-3 * (1 + std::abs(gradient))) << name;
  };
  for (const size_t i : {0UL, 13UL}) {
    expect_slope(layer_case.gate[i], result.grad_gate[i], "gate");
    expect_slope(layer_case.x[i], result.grad_x[i], "x");
  }
  expect_slope(layer_case.gate_bias[3], result.grad_gate_bias[3], "gate_bias");
  expect_slope(layer_case.experts[2].w1[5], result.experts[2].w1[5], "w1");
  expect_slope(layer_case.experts[2].b2[2], result.experts[2].b2[2], "b2");
  expect_slope(layer_case.shared.w2[9], result.shared.w2[9], "w2 of shared experts");
}

}  // namespace
}  // namespace crossdock
