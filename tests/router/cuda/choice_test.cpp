// Ids, weights, losses and gradients of a router on a GPU equal those on the CPU, for every
// configuration. The logits are exact on both, so the choices can be compared strictly.
#include <gtest/gtest.h>

#include <optional>

#include "router/cuda/both_devices.hpp"

namespace crossdock {
namespace {

constexpr Score kScores[] = {Score::kSoftmax, Score::kSoftmaxAfterTopK, Score::kSigmoid,
                             Score::kSqrtSoftplus};

using CudaRouter = CudaTest;

void expect_like_cpu(const reference::RouterInput& input, const BackwardCase& backward,
                     const RouteArgs* other_args = nullptr) {
  const RouterRun run(input);
  const RouteArgs& args = other_args != nullptr ? *other_args : run.args;
  const RankStream stream;
  const RouterValues wanted = run_router(run.router(), args, backward, OnHost{});
  const RouterValues got = run_router(run.router(), args, backward, OnGpu{stream});
  expect_values(got, wanted, input.config.dtype, /*exact_logits=*/true);
}

BackwardCase with_weights(const reference::RouterInput& input) {
  return {.grad_weights = some_grad_weights(input.T, input.config.top_k)};
}

RouterConfig config_with(Score score, DType dtype = DType::kBF16) {
  return {.num_experts = 24,
          .top_k = 4,
          .width = 40,
          .dtype = dtype,
          .score = score,
          .scaling = 2.5,
          .aux_loss_coeff = 0.1,
          .z_loss_coeff = 0.01};
}

std::vector<uint8_t> some_padding(int64_t T) {
  std::vector<uint8_t> mask(static_cast<size_t>(T), 0);
  for (size_t t = 0; t < mask.size(); t += 5) mask[t] = 1;
  return mask;
}

TEST_F(CudaRouter, IsThatOfTheCpuForScoresGroupsBiasNormalisationAndPadding) {
  const std::optional<GroupScore> groups[] = {std::nullopt, GroupScore::kTopShare,
                                              GroupScore::kTop2};
  const std::optional<bool> normalise[] = {std::nullopt, false, true};
  for (const Score score : kScores) {
    for (const auto& group : groups) {
      for (const auto& normalised : normalise) {
        for (const bool is_biased : {false, true}) {
          for (const bool has_padding : {false, true}) {
            SCOPED_TRACE(testing::Message()
                         << name_of(score) << " groups " << (group ? static_cast<int>(*group) : -1)
                         << " normalise " << (normalised ? static_cast<int>(*normalised) : -1)
                         << " bias " << is_biased << " padding " << has_padding);
            RouterConfig config = config_with(score);
            config.normalise = normalised;
            if (group) {
              config.num_groups = 6;
              config.group_top_k = 2;
              config.group_score = *group;
            }
            auto input = exact_input(config, 37);
            if (is_biased) input.expert_bias = separating_bias(config);
            if (has_padding) input.mask = some_padding(37);
            expect_like_cpu(input, with_weights(input));
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(CudaRouter, TakesEveryType) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType gate_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << name_of(dtype) << " gate " << name_of(gate_dtype));
        auto input = exact_input(config_with(Score::kSigmoid, dtype), 50);
        const RouterRun run(input);
        const OwnedTensor gate = reference::to_tensor(gate_dtype, {24, 40}, input.gate);
        const std::vector<double> bias_values = initial_values(24);
        const OwnedTensor bias = reference::to_tensor(gate_dtype, {24}, bias_values);
        RouteArgs args = run.args;
        args.gate = {.weight = gate.view, .bias = bias.view};
        BackwardCase backward = with_weights(input);
        backward.accumulate = accumulate;
        expect_like_cpu(input, backward, &args);
      }
    }
  }
}

TEST_F(CudaRouter, TakesAnyNumberOfExpertsSlotsAndColumns) {
  struct Size {
    int64_t E;
    int64_t K;
    int64_t D;
    int64_t T;
  };
  const Size sizes[] = {{1, 1, 8, 3},     {2, 2, 1, 40},     {8, 2, 33, 100},   {32, 32, 64, 20},
                        {33, 5, 72, 65},  {60, 4, 56, 70},   {64, 8, 96, 64},   {65, 8, 16, 33},
                        {128, 8, 64, 90}, {256, 8, 128, 70}, {512, 10, 40, 40}, {1024, 32, 24, 20}};
  for (const Size& size : sizes) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      SCOPED_TRACE(testing::Message() << size.E << " experts, top " << size.K << ", width "
                                      << size.D << " " << name_of(dtype));
      RouterConfig config = config_with(Score::kSoftmax, dtype);
      config.num_experts = size.E;
      config.top_k = size.K;
      config.width = size.D;
      const auto input = exact_input(config, size.T);
      expect_like_cpu(input, with_weights(input));
    }
  }
}

TEST_F(CudaRouter, TakesTheGroupsOfLargeModels) {
  RouterConfig config = config_with(Score::kSigmoid);
  config.num_experts = 256;
  config.top_k = 8;
  config.num_groups = 8;
  config.group_top_k = 4;
  config.group_score = GroupScore::kTop2;
  auto input = exact_input(config, 60);
  input.expert_bias = separating_bias(config);
  expect_like_cpu(input, with_weights(input));
  config.num_groups = 256;  // of one expert each
  config.group_top_k = 32;
  expect_like_cpu(exact_input(config, 10), {});
}

TEST_F(CudaRouter, TakesForcedRoutes) {
  for (const Score score : kScores) {
    SCOPED_TRACE(name_of(score));
    auto input = exact_input(config_with(score), 30);
    input.mask = some_padding(30);
    for (int64_t t = 0; t < 30; ++t) {
      for (int64_t k = 0; k < 4; ++k) {
        const bool has_none = (t + k) % 6 == 0 || t == 7;
        input.forced_ids.push_back(has_none ? -1 : (t * 5 + k * 7) % 24);
      }
    }
    expect_like_cpu(input, with_weights(input));
    const RouterRun run(input);
    const std::vector<int32_t> narrow(input.forced_ids.begin(), input.forced_ids.end());
    RouteArgs args = run.args;
    args.forced_ids = {narrow.data(), {30, 4}};
    expect_like_cpu(input, with_weights(input), &args);
  }
}

TEST_F(CudaRouter, ForcesBalance) {
  RouterConfig config = config_with(Score::kSoftmax);
  config.force_balance = true;
  const auto input = exact_input(config, 30);
  expect_like_cpu(input, with_weights(input));
}

TEST_F(CudaRouter, JittersAsTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool has_ids : {false, true}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " token ids " << has_ids);
      RouterConfig config = config_with(Score::kSigmoid, dtype);
      config.jitter = 0.125;
      auto input = exact_input(config, 40);
      input.mask = some_padding(40);
      const RouterRun run(input);
      RouteArgs args = run.args;
      args.jitter_seed = 77;
      std::vector<int64_t> ids(40);
      for (size_t t = 0; t < ids.size(); ++t) ids[t] = static_cast<int64_t>(1000 - 3 * t);
      if (has_ids) args.token_ids = {ids.data(), {40}};
      expect_like_cpu(input, with_weights(input), &args);
    }
  }
}

TEST_F(CudaRouter, CountsAndLosesPerSequence) {
  for (const int64_t num_sequences : {3, 600}) {  // 600: too many to count in shared memory
    SCOPED_TRACE(num_sequences);
    RouterConfig config = config_with(Score::kSigmoid);
    config.aux_loss_coeffs = {.batch = 0.3, .sequence = 0.7, .global_batch = 0.11};
    auto input = exact_input(config, 61);
    input.num_sequences = num_sequences;
    input.mask = some_padding(61);
    for (int64_t t = 0; t < 61; ++t) {
      input.sequence_ids.push_back(static_cast<int32_t>(t * 11 % (num_sequences - 1)));
    }
    expect_like_cpu(input, with_weights(input));
  }
}

TEST_F(CudaRouter, TakesNoTokenOneTokenAndPaddingOnly) {
  for (const Score score : kScores) {
    for (const int64_t T : {0, 1, 9}) {
      SCOPED_TRACE(testing::Message() << name_of(score) << " T " << T);
      auto input = exact_input(config_with(score), T);
      if (T == 9) input.mask.assign(9, 1);
      expect_like_cpu(input, with_weights(input));
      BackwardCase accumulating = with_weights(input);
      accumulating.accumulate = true;
      expect_like_cpu(input, accumulating);
    }
  }
}

TEST_F(CudaRouter, WorksWithoutGradientsOfTheWeights) {
  const auto input = exact_input(config_with(Score::kSqrtSoftplus), 20);
  expect_like_cpu(input, {});
}

TEST_F(CudaRouter, ChoosesWhatIsNotANumberLast) {
  RouterConfig config = config_with(Score::kSigmoid);
  config.aux_loss_coeff = 0.0;
  config.z_loss_coeff = 0.0;
  auto input = exact_input(config, 20);
  const RouterRun run(input);
  std::vector<float> bias(24, std::nanf(""));
  for (const size_t e : {7, 3, 20}) bias[e] = static_cast<float>(e % 5);
  RouteArgs args = run.args;
  args.expert_bias = {bias.data(), {24}};
  expect_like_cpu(input, with_weights(input), &args);
}

}  // namespace
}  // namespace crossdock
