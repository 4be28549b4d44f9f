// The check of `crossdock run` must detect wrong values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "cli/run/check.hpp"
#include "crossdock/testing/comparator.hpp"
#include "crossdock/testing/reference.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;

RunJob small_job() {
  RunArgs args;
  args.preset = "gpt-oss-20b";
  args.scale = 90;
  args.ranks = 2;
  args.tokens = 20;  // few enough to be all in the sample
  return make_job(args, nullptr);
}

float& value_of(const TensorView& tensor, int64_t index) {
  return static_cast<float*>(tensor.data)[index];
}

// Runs a step in which one rank corrupts its values, and returns the check of rank 0.
RunCheck check_spoiled(const std::function<void(RunTensors&, RunOutcome&)>& spoil,
                       const RunJob& job = small_job()) {
  RunCheck check;
  run_ranks(job.num_ranks, [&](Group& group) {
    const RunValues values(job);
    RunTensors tensors(job, values, group);
    MoeLayer layer(group, job.layer);
    MoeForwardResult forward = layer.forward({.weights = tensors.weights, .x = tensors.x.view});
    RunOutcome outcome;
    outcome.grad_x = layer.backward({.weights = tensors.weights,
                                     .x = tensors.x.view,
                                     .grad_out = tensors.grad_out.view,
                                     .saved = &forward.saved,
                                     .grads = tensors.grads});
    outcome.out = forward.out;
    outcome.decision = forward.saved.decision;
    if (group.rank() == 1) spoil(tensors, outcome);
    const RunCheck own = check_run(group, job, values, tensors, outcome);
    if (group.rank() == 0) check = own;
  });
  return check;
}

TEST(RunCheck, PassesWhatIsRight) {
  const RunCheck check = check_spoiled([](RunTensors&, RunOutcome&) {});
  EXPECT_TRUE(check.passed) << check.failure;
  EXPECT_EQ(check.num_tokens, 40);
  EXPECT_EQ(check.num_experts, 2);
}

TEST(RunTensors, AreCopiedToADeviceAndTheirGradientsBack) {
  const RunJob job = small_job();
  run_ranks(1, [&](Group& group) {
    const RunTensors host(job, RunValues(job), group);
    const std::unique_ptr<RankDevice> device = make_host_device();
    const RunTensors copy(host, *device);
    EXPECT_NE(copy.x.view.data, host.x.view.data);
    EXPECT_EQ(reference::to_values(copy.x), reference::to_values(host.x));
    EXPECT_NE(copy.weights.experts.b2.data, host.weights.experts.b2.data);
    EXPECT_EQ(reference::to_values(copy.weights.experts.b2),
              reference::to_values(host.weights.experts.b2));
    EXPECT_FALSE(copy.weights.shared.w1.given());
    for (const auto& [grads, value] : {std::pair(&host.grads, 0.0f), {&copy.grads, 3.0f}}) {
      for (const TensorView& view : {grads->gate, grads->gate_bias, grads->experts.w1,
                                     grads->experts.w2, grads->experts.b1, grads->experts.b2}) {
        std::ranges::fill(view.as<float>(), value);
      }
    }
    host.read_gradients(copy, *device);
    EXPECT_THAT(reference::to_values(host.grads.gate), testing::Each(3.0));
    EXPECT_THAT(reference::to_values(host.grads.experts.b2), testing::Each(3.0));
  });
}

TEST(RunCheck, SeesAWrongOutput) {
  const RunCheck check = check_spoiled(
      [](RunTensors&, RunOutcome& outcome) { value_of(outcome.out.view, 37) += 0.01f; });
  EXPECT_FALSE(check.passed);
  EXPECT_THAT(check.failure, HasSubstr("rank 1: out of token 21"));
}

TEST(RunCheck, SeesAWrongGradientOfATokenEvenIfItIsNotANumber) {
  const RunCheck check = check_spoiled([](RunTensors&, RunOutcome& outcome) {
    value_of(outcome.grad_x.view, 0) = std::numeric_limits<float>::quiet_NaN();
  });
  EXPECT_FALSE(check.passed);
  EXPECT_THAT(check.failure, HasSubstr("grad_x of token 20"));
}

TEST(RunCheck, SeesAMissingContributionToWeightGradients) {
  for (const auto member :
       {&ExpertGradients::w1, &ExpertGradients::w2, &ExpertGradients::b1, &ExpertGradients::b2}) {
    const RunCheck check = check_spoiled([&](RunTensors& tensors, RunOutcome&) {
      const TensorView grads = tensors.grads.experts.*member;
      for (int64_t i = 0; i < grads.num_elements(); ++i) value_of(grads, i) *= 0.99f;
    });
    EXPECT_FALSE(check.passed);
    EXPECT_THAT(check.failure, HasSubstr("of expert"));
  }
}

TEST(RunCheck, SeesARouteThatIsNotTheBest) {
  const RunCheck check = check_spoiled([](RunTensors&, RunOutcome& outcome) {
    auto* ids = reinterpret_cast<int32_t*>(outcome.decision.router->expert_ids.data());
    ids[0] = ids[0] == 0 ? 31 : ids[0] - 1;
  });
  EXPECT_FALSE(check.passed);
}

// At width 1 terms cancel, and no other value shows how large they were.
RunJob narrow_job(uint64_t seed, const std::string& dtype) {
  RunArgs args;
  args.width = 1;
  args.inner = 8;
  args.experts = 8;
  args.top_k = 2;
  args.ranks = 2;
  args.tokens = 32;
  args.seed = seed;
  args.dtype = dtype;
  return make_job(args, nullptr);
}

TEST(RunCheck, PassesWhatIsRightAtWidthOne) {
  for (const char* dtype : {"fp64", "fp32", "bf16", "fp16"}) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      const RunCheck check =
          check_spoiled([](RunTensors&, RunOutcome&) {}, narrow_job(seed, dtype));
      EXPECT_TRUE(check.passed) << dtype << " seed " << seed << ": " << check.failure;
      EXPECT_EQ(check.num_tokens, 64);
    }
  }
}

// Values are near 1, rounding errors near 1e-7.
TEST(RunCheck, SeesAWrongValueAtWidthOne) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    for (const int64_t token : {0, 21}) {
      const auto spoil_out = [&](RunTensors&, RunOutcome& outcome) {
        value_of(outcome.out.view, token) += 3e-4f;
      };
      EXPECT_THAT(check_spoiled(spoil_out, narrow_job(seed, "fp32")).failure,
                  HasSubstr("rank 1: out of token " + std::to_string(32 + token)));
      const auto spoil_grad = [&](RunTensors&, RunOutcome& outcome) {
        value_of(outcome.grad_x.view, token) += 1e-3f;
      };
      EXPECT_THAT(check_spoiled(spoil_grad, narrow_job(seed, "fp32")).failure,
                  HasSubstr("rank 1: grad_x of token " + std::to_string(32 + token)));
    }
  }
}

TEST(RunCheck, SeesWhatIsJustOutsideTheTolerance) {
  const RunJob job = small_job();
  const auto terms = static_cast<double>(job.layer.router.width + job.layer.experts.inner);
  const double tolerance = (8 + 16 * std::sqrt(terms)) * reference::epsilon_of(DType::kF32);
  const auto spoil = [&](RunTensors&, RunOutcome& outcome) {
    const std::span<float> token =
        outcome.out.view.as<float>().first(static_cast<size_t>(job.layer.router.width));
    float largest = 0;
    for (const float value : token) largest = std::max(largest, std::abs(value));
    token[3] += static_cast<float>(1.25 * tolerance) * largest;
  };
  EXPECT_THAT(check_spoiled(spoil).failure, HasSubstr("rank 1: out of token 20, value 3"));
}

// Would take a minute if the reference needed E * E steps per token.
TEST(RunCheck, ChecksManyExperts) {
  RunArgs args;
  args.width = 2;
  args.inner = 1;
  args.experts = 20000;
  args.ranks = 2;
  args.tokens = 8;
  const RunCheck check = check_spoiled([](RunTensors&, RunOutcome&) {}, make_job(args, nullptr));
  EXPECT_TRUE(check.passed) << check.failure;
  EXPECT_EQ(check.num_tokens, 16);
}

}  // namespace
}  // namespace crossdock::cli
