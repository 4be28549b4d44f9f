// `crossdock eval --check` must accept correct results and detect wrong ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "cli/eval/check.hpp"
#include "crossdock/testing/comparator.hpp"

namespace crossdock::cli {
namespace {

using testing::HasSubstr;
using Values = std::vector<double>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::array kAllPartialSums = {PartialSums::kNone, PartialSums::kF32,
                                        PartialSums::kRowType};
constexpr std::array kDTypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};

// One rank and one expert that returns its rows. One route per token.
EvalCase identity_case(DType dtype, const Values& x, const Values& weights) {
  EvalCase eval_case{.strategy = "alltoall", .dtype = dtype, .layer = {}};
  eval_case.layer.config = {.num_experts = 1, .top_k = 1, .width = 1};
  reference::RankInput rank{.T = std::ssize(x),
                            .x = x,
                            .expert_ids = std::vector<int64_t>(x.size(), 0),
                            .weights = weights,
                            .grad_out = Values(x.size(), 1.0),
                            .mask = {}};
  for (double& value : rank.x) value = reference::round_to(dtype, value);
  for (double& value : rank.weights) {
    value = reference::round_to(eval_case.weight_dtype(), value);
  }
  eval_case.layer.ranks.push_back(rank);
  return eval_case;
}

struct MlpSizes {
  int64_t D = 4;
  int64_t F = 6;
  Activation activation = Activation::kSwiglu;
  DType dtype = DType::kF32;
};

// Two ranks and four experts with random values.
EvalCase mlp_case(const MlpSizes& sizes, uint32_t seed = 1) {
  constexpr int64_t kTokens = 5;
  EvalCase eval_case{.strategy = "direct", .dtype = sizes.dtype, .layer = {}};
  std::mt19937 random(seed);
  const auto draw = [&](int64_t count, DType dtype) {
    std::uniform_real_distribution<double> distribution(-1.0, 1.0);
    Values values(static_cast<size_t>(count));
    for (double& value : values) value = reference::round_to(dtype, distribution(random));
    return values;
  };
  reference::LayerInput& layer = eval_case.layer;
  layer.config = {.num_experts = 4, .top_k = 2, .width = sizes.D};
  layer.mlp = {.D = sizes.D, .F = sizes.F, .activation = sizes.activation};
  for (int r = 0; r < 2; ++r) {
    std::vector<int64_t> ids;
    for (int64_t t = 0; t < kTokens; ++t) {
      ids.push_back(t % 4);
      ids.push_back((t + 1 + r) % 4);
    }
    layer.ranks.push_back({.T = kTokens,
                           .x = draw(kTokens * sizes.D, sizes.dtype),
                           .expert_ids = ids,
                           .weights = draw(kTokens * 2, eval_case.weight_dtype()),
                           .grad_out = draw(kTokens * sizes.D, sizes.dtype),
                           .mask = {}});
  }
  const int64_t height = is_gated(sizes.activation) ? 2 * sizes.F : sizes.F;
  for (int e = 0; e < 4; ++e) {
    layer.experts.push_back({.w1 = draw(height * sizes.D, sizes.dtype),
                             .w2 = draw(sizes.D * sizes.F, sizes.dtype),
                             .b1 = draw(height, sizes.dtype),
                             .b2 = draw(sizes.D, sizes.dtype)});
  }
  return eval_case;
}

CheckReport check(const EvalCase& eval_case) {
  return check_result(eval_case, run_case(eval_case));
}

CheckReport check_spoiled(const EvalCase& eval_case,
                          const std::function<void(EvalResult&)>& spoil) {
  EvalResult result = run_case(eval_case);
  spoil(result);
  return check_result(eval_case, result);
}

double largest(const Values& values) {
  double most = 0.0;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

TEST(EvalCheck, PassesDropsByWeightWhereWeightsAreNegative) {
  EvalCase eval_case = identity_case(DType::kF32, {0.1, 0.7, 0.3}, {-3.1, 0.5, 0.2});
  eval_case.layer.config.capacity = Capacity{.factor = 0.5, .policy = DropPolicy::kWeight};
  eval_case.layer.config.partial_sums =
      PartialSums::kF32;  // no exact bits: compared with a tolerance
  for (const Values& weights : {Values{-3.1, 0.5, 0.2}, Values{-0.7, -0.1, -0.3}}) {
    for (size_t i = 0; i < weights.size(); ++i) {
      eval_case.layer.ranks[0].weights[i] = reference::round_to(DType::kF32, weights[i]);
    }
    const CheckReport report = check(eval_case);
    EXPECT_TRUE(report.passed) << report.summary;
  }
}

TEST(EvalCheck, PassesDropsByWeightWhereAWeightIsNotANumber) {
  EvalCase eval_case = identity_case(DType::kF32, {0.1, 0.7, 0.3}, {0.5, kNan, 0.2});
  eval_case.layer.config.capacity = Capacity{.factor = 0.7, .policy = DropPolicy::kWeight};
  eval_case.layer.config.nonfinite = NonFinite::kPropagate;
  eval_case.layer.config.partial_sums = PartialSums::kF32;
  const CheckReport report = check(eval_case);
  EXPECT_TRUE(report.passed) << report.summary;
}

TEST(EvalCheck, PassesWhatIsNotFiniteThroughEveryActivation) {
  for (const std::string_view name : kActivationNames) {
    for (const double value : {kNan, kInf, -kInf}) {
      EvalCase eval_case = mlp_case({.activation = parse_activation(name)});
      eval_case.layer.ranks[0].x[1] = value;
      const CheckReport report = check(eval_case);
      EXPECT_TRUE(report.passed) << name << " of " << value << ": " << report.summary;
    }
  }
}

// Without a bias, an infinite weight has no 0 to multiply. Experts of one rank have biases
// together: those without one have zeros.
TEST(EvalCheck, PassesAnInfiniteWeightInTheExperts) {
  for (const size_t num_with_bias : {0, 1, 4}) {
    EvalCase eval_case = mlp_case({.F = 1});  // more inner values would sum to NaN
    eval_case.layer.weights_in_experts = true;
    eval_case.layer.config.nonfinite = NonFinite::kPropagate;
    for (size_t e = 0; e < eval_case.layer.experts.size(); ++e) {
      Values& b2 = eval_case.layer.experts[e].b2;
      b2.assign(e < num_with_bias ? 4 : 0, 0.5);
    }
    for (reference::RankInput& rank : eval_case.layer.ranks) rank.weights[1] = kInf;
    const CheckReport report = check(eval_case);
    EXPECT_TRUE(report.passed) << num_with_bias << " experts with b2: " << report.summary;
  }
}

TEST(EvalCheck, PassesANanThatOnlyOneSideOfAClampedGateMeets) {
  for (const bool gate : {false, true}) {
    for (const double other : {100.0, -100.0, 0.5}) {
      EvalCase eval_case = mlp_case({.D = 1, .F = 1, .activation = Activation::kClampedSwiglu});
      for (reference::MlpWeights& expert : eval_case.layer.experts) {
        expert.b1 = {gate ? kNan : other, gate ? other : kNan};
      }
      const CheckReport report = check(eval_case);
      EXPECT_TRUE(report.passed) << gate << " " << other << ": " << report.summary;
    }
  }
}

TEST(EvalCheck, SeesANumberWhereTheReferenceHasNoneAndTheOtherWayRound) {
  EvalCase eval_case = mlp_case({.activation = Activation::kSquaredRelu});
  EXPECT_FALSE(
      check_spoiled(eval_case, [](EvalResult& result) { result.ranks[1].out[2] = kNan; }).passed);
  EXPECT_FALSE(
      check_spoiled(eval_case, [](EvalResult& result) { result.ranks[1].out[2] = kInf; }).passed);
  eval_case.layer.ranks[0].x[0] = kNan;
  EXPECT_FALSE(
      check_spoiled(eval_case, [](EvalResult& result) { result.ranks[0].out[0] = 0.0; }).passed);
}

// Values near the smallest normal number and far below it, none of them a power of two.
TEST(EvalCheck, PassesCorrectlyRoundedDenormalsAndSeesTheirNeighbours) {
  for (const DType dtype : kDTypes) {
    for (const bool in_experts : {false, true}) {
      for (const PartialSums partial_sums : kAllPartialSums) {
        const double spacing = reference::denormal_spacing_of(dtype);
        EvalCase eval_case = identity_case(dtype, {spacing * 3, spacing * 7, spacing * 900, 1.0},
                                           {0.3, 0.2, 0.15, spacing * 5.3});
        eval_case.layer.config.partial_sums = partial_sums;
        eval_case.layer.weights_in_experts = in_experts;
        const CheckReport report = check(eval_case);
        EXPECT_TRUE(report.passed) << name_of(dtype) << ": " << report.summary;
        for (const size_t place : {0, 3}) {
          const auto spoil = [&](EvalResult& result) { result.ranks[0].out[place] += 4 * spacing; };
          EXPECT_FALSE(check_spoiled(eval_case, spoil).passed) << name_of(dtype) << place;
        }
      }
    }
  }
}

TEST(EvalCheck, PassesDenormalsInsideTheExperts) {
  for (const DType dtype : kDTypes) {
    for (const std::string_view name : kActivationNames) {
      for (const double size : {0x1p-3, 0x1p-7, 0x1p-10}) {
        EvalCase eval_case = mlp_case({.activation = parse_activation(name), .dtype = dtype});
        // Brings the inner values close to the smallest of each type.
        const double factor =
            dtype == DType::kF16 ? size : size * std::sqrt(reference::denormal_spacing_of(dtype));
        for (reference::RankInput& rank : eval_case.layer.ranks) {
          for (double& value : rank.x) value = reference::round_to(dtype, value * factor);
        }
        for (reference::MlpWeights& expert : eval_case.layer.experts) {
          for (double& value : expert.w1) value = reference::round_to(dtype, value * factor);
          expert.b1.clear();
        }
        const CheckReport report = check(eval_case);
        EXPECT_TRUE(report.passed)
            << name_of(dtype) << " " << name << " " << size << ": " << report.summary;
      }
    }
  }
}

TEST(EvalCheck, PassesWhatIsTooLargeForItsTypeAndSeesAWrongSign) {
  for (const PartialSums partial_sums : kAllPartialSums) {
    for (const bool in_experts : {false, true}) {
      EvalCase eval_case = identity_case(DType::kF16, {60000, -60000, 1}, {2, 2, 2});
      eval_case.layer.config.partial_sums = partial_sums;
      eval_case.layer.weights_in_experts = in_experts;
      const CheckReport report = check(eval_case);
      EXPECT_TRUE(report.passed) << report.summary;
      const auto spoil = [](EvalResult& result) { result.ranks[0].out[0] = -kInf; };
      EXPECT_FALSE(check_spoiled(eval_case, spoil).passed);
      const auto spoil_small = [](EvalResult& result) { result.ranks[0].out[2] = kInf; };
      EXPECT_FALSE(check_spoiled(eval_case, spoil_small).passed);
    }
  }
}

// The partial sums of the two ranks are too large for fp16; their sum is not.
TEST(EvalCheck, PassesPartialSumsThatAreTooLargeForTheRowType) {
  EvalCase eval_case = identity_case(DType::kF16, {60000, 1}, {2, 2});
  eval_case.layer.config = {.num_experts = 2, .top_k = 2, .width = 1};
  eval_case.layer.ranks[0].expert_ids = {0, 1, 0, 1};
  eval_case.layer.ranks[0].weights = {2, -2, 2, -2};
  eval_case.layer.ranks.push_back({.T = 0});
  for (const PartialSums partial_sums : kAllPartialSums) {
    eval_case.layer.config.partial_sums = partial_sums;
    const bool overflows = partial_sums == PartialSums::kRowType;
    EXPECT_EQ(std::isnan(run_case(eval_case).ranks[0].out[0]), overflows);
    const CheckReport report = check(eval_case);
    EXPECT_TRUE(report.passed) << report.summary;
    const auto spoil = [](size_t place) {
      return [place](EvalResult& result) { result.ranks[0].out[place] = kInf; };
    };
    EXPECT_EQ(check_spoiled(eval_case, spoil(0)).passed, overflows);
    EXPECT_FALSE(check_spoiled(eval_case, spoil(1)).passed);
  }
}

// At width 1 terms cancel, and no other value of the result shows how large they were.
TEST(EvalCheck, PassesSumsThatCancel) {
  for (const DType dtype : kDTypes) {
    for (uint32_t seed = 0; seed < 40; ++seed) {
      EvalCase eval_case = mlp_case({.D = 1, .F = 64, .dtype = dtype}, seed);
      for (reference::RankInput& rank : eval_case.layer.ranks) rank.T = 1;
      for (reference::RankInput& rank : eval_case.layer.ranks) {
        rank.x.resize(1);
        rank.grad_out.resize(1);
        rank.expert_ids.resize(2);
        rank.weights.resize(2);
      }
      const CheckReport report = check(eval_case);
      EXPECT_TRUE(report.passed) << name_of(dtype) << " seed " << seed << ": " << report.summary;
      const auto spoil = [&](EvalResult& result) {
        result.ranks[0].out[0] += 40 * 64 * reference::epsilon_of(dtype);
      };
      EXPECT_FALSE(check_spoiled(eval_case, spoil).passed) << name_of(dtype) << " seed " << seed;
    }
  }
}

TEST(EvalCheck, SeesWhatIsJustOutsideTheTolerance) {
  for (const DType dtype : kDTypes) {
    const EvalCase eval_case = mlp_case({.dtype = dtype});
    const double tolerance = 32 * reference::epsilon_of(dtype) +
                             (4 + 2 + 6) * reference::epsilon_of(eval_case.weight_dtype());
    using Member = std::function<Values&(EvalResult&)>;
    const std::vector<std::pair<const char*, Member>> members = {
        {"out of rank 1", [](EvalResult& r) -> Values& { return r.ranks[1].out; }},
        {"grad_x of rank 1", [](EvalResult& r) -> Values& { return r.ranks[1].grad_x; }},
        {"grad_weights of rank 1",
         [](EvalResult& r) -> Values& { return r.ranks[1].grad_weights; }},
        {"grad_w1 of expert 2", [](EvalResult& r) -> Values& { return r.expert_grads[2].w1; }},
        {"grad_w2 of expert 2", [](EvalResult& r) -> Values& { return r.expert_grads[2].w2; }},
        {"grad_b1 of expert 2", [](EvalResult& r) -> Values& { return r.expert_grads[2].b1; }},
        {"grad_b2 of expert 2", [](EvalResult& r) -> Values& { return r.expert_grads[2].b2; }}};
    for (const auto& [name, member] : members) {
      const auto spoil = [&, &of = member](EvalResult& result) {
        Values& values = of(result);
        values[1] += 1.25 * tolerance * largest(values);
      };
      const CheckReport report = check_spoiled(eval_case, spoil);
      EXPECT_FALSE(report.passed) << name_of(dtype) << " " << name;
      EXPECT_THAT(report.summary, HasSubstr(name));
    }
  }
}

TEST(EvalCheck, SeesASumOfExactRowsThatIsOffByABit) {
  for (const DType dtype : kDTypes) {
    const EvalCase eval_case = identity_case(dtype, {0.3, 0.7}, {0.3, 0.2});
    const auto spoil = [&](EvalResult& result) {
      result.ranks[0].out[1] *= 1 + reference::epsilon_of(dtype);
    };
    EXPECT_FALSE(check_spoiled(eval_case, spoil).passed) << name_of(dtype);
  }
}

}  // namespace
}  // namespace crossdock::cli
