// What `crossdock run` compares with the reference must see a wrong value.
#include "run_check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace crossdock::cli {
namespace {

using testing::HasSubstr;

RunJob small_job() {
  RunArgs args;
  args.preset = "gpt-oss-20b";
  args.scale = 90;
  args.ranks = 2;
  args.tokens = 20;  // few enough that all are in the sample
  return make_job(args, 0);
}

float& value_of(const TensorView& tensor, int64_t index) {
  return static_cast<float*>(tensor.data)[index];
}

// Runs a step, lets one rank spoil what it has, and returns the verdict of rank 0.
RunCheck check_spoiled(const std::function<void(RunTensors&, RunOutcome&)>& spoil) {
  const RunJob job = small_job();
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

}  // namespace
}  // namespace crossdock::cli
