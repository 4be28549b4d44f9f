#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "crossdock/error.hpp"
#include "dispatch/kept_routes.hpp"
#include "plan/local_routes.hpp"
#include "plan/plan_builder.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using Ids = std::vector<int32_t>;
using Counts = std::vector<int64_t>;
using Weights = std::vector<float>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string refusal_of(const std::function<void()>& call) {
  return message_of(call, ErrorCode::kInvalidArgument);
}

template <typename Weight = float>
std::vector<Weight> weights_of(const LocalRoutes& routes) {
  const auto* first = reinterpret_cast<const Weight*>(routes.weights.data());
  return {first, first + routes.expert_ids.size()};
}

const DispatchConfig kFourExperts{.num_experts = 4, .top_k = 2, .width = 1};

TEST(Routes, BadIdsAndWeightsNameTokenAndSlot) {
  EXPECT_EQ(refusal_of([] {
              read_kept_routes(kFourExperts, {0, 1, 2, 4});
            }),
            "token 1, slot 1: expert id 4 must be in [0, 4), or -1 for no route");
  EXPECT_EQ(refusal_of([] {
              read_kept_routes(kFourExperts, {0, -2});
            }),
            "token 0, slot 1: expert id -2 must be in [0, 4), or -1 for no route");
  EXPECT_EQ(
      refusal_of([] {
        read_kept_routes(kFourExperts, {0, 1, 3, 3});
      }),
      "token 1, slot 1: expert id 3 is already in slot 0; a token may name an expert only once");
  EXPECT_EQ(refusal_of([] {
              read_kept_routes(kFourExperts, {0, 1, 2, 3}, {1, 1, -kInfinity, 1});
            }),
            "token 1, slot 0: weight must be finite, got -Infinity; nonfinite = propagate allows "
            "it");
  EXPECT_EQ(refusal_of([] {
              read_kept_routes(kFourExperts, {0, 1}, {1, kNaN});
            }),
            "token 0, slot 1: weight must be finite, got NaN; nonfinite = propagate allows it");
}

TEST(Routes, AnIdMayReturnInTheNextToken) {
  EXPECT_EQ(read_kept_routes(kFourExperts, {0, 1, 1, 0}).counts, (Counts{2, 2, 0, 0}));
}

TEST(Routes, NonFiniteWeightsPassWhenAskedFor) {
  DispatchConfig config = kFourExperts;
  config.nonfinite = NonFinite::kPropagate;
  EXPECT_EQ(weights_of(read_kept_routes(config, {0, 1}, {kInfinity, 2}))[0], kInfinity);
}

TEST(Routes, WeightsWithoutARouteAreNotLookedAt) {
  EXPECT_EQ(weights_of(read_kept_routes(kFourExperts, {0, -1}, {1.0F, kNaN})), (Weights{1, 0}));
  BufferPool pool;
  const std::vector<int64_t> ids = {99, 99, 1, 2};  // the first token is masked
  const std::vector<double> weights = {kNaN, kNaN, 0.25, 0.0};
  const bool mask[] = {true, false};
  const auto masked = read_routes(Routing{.expert_ids = {ids.data(), {2, 2}},
                                          .weights = {weights.data(), {2, 2}},
                                          .mask = {mask, {2}}},
                                  kFourExperts, pool);
  EXPECT_EQ(masked.expert_ids, (Ids{-1, -1, 1, 2}));  // a weight of 0 is a real route
  EXPECT_EQ(masked.counts, (Counts{0, 1, 1, 0}));
  EXPECT_EQ(weights_of<double>(masked), (std::vector<double>{0, 0, 0.25, 0}));
}

TEST(Routes, NarrowWeightsAreKeptInFp32) {
  BufferPool pool;
  const Ids ids = {0, 1};
  const BF16 narrow[] = {to_bf16(0.375F), to_bf16(-2.0F)};
  const F16 half[] = {to_f16(0.375F), to_f16(-2.0F)};
  for (const ConstTensorView& weights :
       {ConstTensorView(narrow, {1, 2}), ConstTensorView(half, {1, 2})}) {
    const LocalRoutes routes =
        read_routes(Routing{.expert_ids = {ids.data(), {1, 2}}, .weights = weights, .mask = {}},
                    kFourExperts, pool);
    EXPECT_EQ(routes.weight_dtype, DType::kF32);
    EXPECT_EQ(weights_of(routes), (Weights{0.375F, -2}));
  }
}

TEST(Routes, WrongShapesAndTypesSayWhatIsWanted) {
  BufferPool pool;
  const Ids ids(6);
  const Weights weights(6);
  const auto message = [&](const ConstTensorView& expert_ids, const ConstTensorView& given) {
    return message_of([&] {
      read_routes(Routing{.expert_ids = expert_ids, .weights = given, .mask = {}}, kFourExperts,
                  pool);
    });
  };
  EXPECT_EQ(message({ids.data(), {2, 3}}, {}),
            "expert_ids must be [T, 2] int32 or int64, got [2, 3] int32");
  EXPECT_EQ(message({}, {}), "expert_ids must be [T, 2] int32 or int64, got nothing");
  EXPECT_EQ(message({ids.data(), {3, 2}}, {weights.data(), {2, 2}}),
            "weights must be [3, 2] fp32, fp64, bf16 or fp16, got [2, 2] fp32");
  EXPECT_EQ(message({nullptr, DType::kI32, {3, 2}}, {weights.data(), {3, 2}}),
            "expert_ids of shape [3, 2] must have memory, got a null pointer");
  EXPECT_EQ(message({ids.data(), DType::kI32, {3, 2}, {DeviceKind::kCuda, 0}}, {}),
            "expert_ids must be in host memory, it is on GPU 0");
  EXPECT_EQ(message({nullptr, DType::kI32, {0, 2}}, {nullptr, DType::kF32, {0, 2}}),
            "nothing was thrown");
}

TEST(Routes, ADenseMapHasItsSlotsInAscendingExpertOrder) {
  BufferPool pool;
  const bool map[] = {false, true,  false, true,  false, false,
                      false, false, true,  false, false, false};
  const Weights weights = {kNaN, 1, kNaN, 2, kNaN, kNaN, kNaN, kNaN, 3, kNaN, kNaN, kNaN};
  const auto routes = read_routes(
      DenseRouting{.map = {map, {3, 4}}, .weights = {weights.data(), {3, 4}}, .mask = {}},
      kFourExperts, pool);
  EXPECT_EQ(routes.expert_ids, (Ids{1, 3, -1, -1, 0, -1}));
  EXPECT_EQ(weights_of(routes), (Weights{1, 2, 0, 0, 3, 0}));

  const bool mask[] = {false, false, true};
  const auto masked = read_routes(
      DenseRouting{.map = {map, {3, 4}}, .weights = {weights.data(), {3, 4}}, .mask = {mask, {3}}},
      kFourExperts, pool);
  EXPECT_EQ(masked.expert_ids, (Ids{1, 3, -1, -1, -1, -1}));
  EXPECT_EQ(masked.counts, (Counts{0, 1, 0, 1}));
  EXPECT_EQ(weights_of(masked), (Weights{1, 2, 0, 0, 0, 0}));
}

// Two tokens with 3 and 4 bits; the second may be masked.
LocalRoutes read_crowded_map(const DispatchConfig& config, const bool* mask = nullptr) {
  static BufferPool pool;
  const bool map[] = {true, false, true, true, true, true, true, true};
  const Weights weights = {1, kNaN, 2, 3, 4, 5, 6, 7};
  DenseRouting routing{.map = {map, {2, 4}}, .weights = {weights.data(), {2, 4}}, .mask = {}};
  if (mask != nullptr) routing.mask = {mask, {2}};
  return read_routes(routing, config, pool);
}

TEST(Routes, ADenseMapHasAsManySlotsAsItsFullestTokenNeeds) {
  const LocalRoutes routes = read_crowded_map(kFourExperts);
  EXPECT_EQ(routes.K, 4);
  EXPECT_EQ(routes.expert_ids, (Ids{0, 2, 3, -1, 0, 1, 2, 3}));
  EXPECT_EQ(weights_of(routes), (Weights{1, 2, 3, 0, 4, 5, 6, 7}));
  const bool mask[] = {false, true};
  const LocalRoutes masked = read_crowded_map(kFourExperts, mask);
  EXPECT_EQ(masked.K, 3);
  EXPECT_EQ(masked.expert_ids, (Ids{0, 2, 3, -1, -1, -1}));
}

TEST(Routes, ADenseMapIsHeldToItsBound) {
  DispatchConfig config = kFourExperts;
  config.max_routes_per_token = 3;
  EXPECT_EQ(refusal_of([&] { read_crowded_map(config); }),
            "token 1: 4 experts are set, at most max_routes_per_token (3) may be");
  const bool mask[] = {true, true};
  EXPECT_EQ(read_crowded_map(config, mask).K, 3);  // whatever the map has
}

TEST(Routes, WidenedSlotsAreUnused) {
  BufferPool pool;
  LocalRoutes routes = read_kept_routes(kFourExperts, {0, 1, 3, -1}, {.5F, .25F, 2, 1});
  widen_slots(3, routes, pool);
  EXPECT_EQ(routes.K, 3);
  EXPECT_EQ(routes.expert_ids, (Ids{0, 1, -1, 3, -1, -1}));
  EXPECT_EQ(weights_of(routes), (Weights{.5F, .25F, 0, 2, 0, 0}));
}

TEST(Capacity, IsComputedInDouble) {
  DispatchConfig config{.num_experts = 8, .top_k = 2, .capacity = Capacity{.factor = 0.5}};
  EXPECT_EQ(capacity_rows(config, 16), 2);
  config.capacity->factor = 0.6;
  EXPECT_EQ(capacity_rows(config, 16), 3);
  config.capacity->factor = 1.1;
  EXPECT_EQ(capacity_rows(config, 200), 56);
}

// C = ceil(4 * 1 / 2 * 1) = 2 with four tokens.
DispatchConfig two_experts(DropPolicy policy) {
  return {.num_experts = 2, .top_k = 1, .width = 1, .capacity = Capacity{.policy = policy}};
}

TEST(Capacity, PositionKeepsTheFirst) {
  const auto routes =
      read_kept_routes(two_experts(DropPolicy::kPosition), {1, 1, 1, 0}, {.1F, .2F, .3F, .4F});
  EXPECT_EQ(routes.expert_ids, (Ids{1, 1, -1, 0}));
  EXPECT_EQ(routes.dropped, (Counts{0, 1}));
  EXPECT_EQ(routes.counts, (Counts{1, 2}));
  EXPECT_EQ(weights_of(routes), (Weights{.1F, .2F, 0, .4F}));
}

TEST(Capacity, WeightKeepsTheLargestAndTiesGoToTheFirst) {
  const DispatchConfig config = two_experts(DropPolicy::kWeight);
  EXPECT_EQ(read_kept_routes(config, {1, 1, 1, 0}, {.1F, .2F, .3F, .4F}).expert_ids,
            (Ids{-1, 1, 1, 0}));
  EXPECT_EQ(read_kept_routes(config, {1, 1, 1, 1}, {.5F, .2F, .5F, .5F}).expert_ids,
            (Ids{1, -1, 1, -1}));
  EXPECT_EQ(read_kept_routes(config, {1, 1, 1, 1}, {.5F, .5F, .5F, .9F}).expert_ids,
            (Ids{1, -1, -1, 1}));
  EXPECT_EQ(read_kept_routes(config, {0, 1, 1, 1}, {.5F, .0F, -.0F, .1F}).expert_ids,
            (Ids{0, 1, -1, 1}));
}

TEST(Capacity, WeightPolicyKeepsNaNsVisible) {
  DispatchConfig config = two_experts(DropPolicy::kWeight);
  config.nonfinite = NonFinite::kPropagate;
  EXPECT_EQ(read_kept_routes(config, {1, 1, 1, 1}, {.5F, kNaN, .9F, .7F}).expert_ids,
            (Ids{-1, 1, 1, -1}));
}

TEST(Capacity, PaddedSegmentsTakeNoMoreTokensThanConfigured) {
  DispatchConfig config = two_experts(DropPolicy::kPosition);
  config.capacity->pad_to_capacity = true;
  config.capacity->max_tokens = 4;
  EXPECT_EQ(read_kept_routes(config, {0, 0}).expert_ids, (Ids{0, 0}));  // C = 2 whatever T is
  EXPECT_EQ(refusal_of([&] {
              read_kept_routes(config, {0, 0, 0, 0, 0});
            }),
            "T is 5, must be at most max_tokens (4) with pad_to_capacity");
}

TEST(Config, RulesAreNamedWithTheirNumbers) {
  const auto message = [](const DispatchConfig& config) {
    return message_of([&] { check_config(config, 4); });
  };
  const DispatchConfig good{.num_experts = 4, .top_k = 2, .width = 8};
  EXPECT_EQ(message(good), "nothing was thrown");
  DispatchConfig bad = good;
  bad.top_k = 12;
  EXPECT_EQ(message(bad), "num_experts (4) must be at least top_k (12)");
  bad = good;
  bad.width = 0;
  EXPECT_EQ(message(bad), "width must be in [1, 2147483647], got 0");
  bad = good;
  bad.alignment = 24;
  EXPECT_EQ(message(bad), "alignment must be 1, 8, 16, 32, 64, 128 or 256, got 24");
  bad = good;
  bad.placement = {0, 1, 4, 2};
  EXPECT_EQ(message(bad), "placement of expert 2 must be a rank in [0, 4), got 4");
  bad.placement = {0, 1};
  EXPECT_EQ(message(bad), "placement must name the rank of each of the 4 experts, got 2 entries");
  bad = good;
  bad.capacity = Capacity{.factor = 0.0};
  EXPECT_EQ(message(bad), "the capacity factor must be positive and finite, got 0");
  bad.capacity = Capacity{.factor = 1.0, .pad_to_capacity = true};
  EXPECT_NE(message(bad).find("pad_to_capacity needs max_tokens"), std::string::npos);
  bad.capacity = Capacity{.factor = 1e300, .pad_to_capacity = true, .max_tokens = 5};
  EXPECT_NE(message(bad).find("more than can be counted"), std::string::npos);
  bad = good;
  bad.max_routes_per_token = 5;
  EXPECT_EQ(message(bad),
            "max_routes_per_token must be 0 (no bound) or from top_k (2) to num_experts (4), got "
            "5");
  bad = good;
  bad.max_rows = -1;
  EXPECT_EQ(message(bad), "max_rows must not be negative, got -1");
}

}  // namespace
}  // namespace crossdock
