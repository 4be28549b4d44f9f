#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "crossdock/cuda.hpp"
#include "crossdock/error.hpp"
#include "crossdock/router.hpp"
#include "router/router_case.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using testing::HasSubstr;

TEST(Router, SaysWhatIsWrongWithAConfiguration) {
  const auto message = [](const RouterConfig& config) {
    return message_of([&] { const Router router(config); });
  };
  RouterConfig config{.num_experts = 10, .top_k = 12, .width = 4};
  EXPECT_THAT(message(config), HasSubstr("num_experts (10) must be at least top_k (12)"));
  config.top_k = 4;
  config.num_groups = 3;
  EXPECT_THAT(message(config), HasSubstr("must be a multiple of num_groups (3)"));
  config.num_groups = 5;
  config.group_top_k = 3;
  EXPECT_THAT(message(config), HasSubstr("top_k (4) must be a multiple of group_top_k (3)"));
  config.group_top_k = 1;
  EXPECT_THAT(message(config),
              HasSubstr("groups of 2 experts must have at least top_k (4) experts"));
}

TEST(Router, RefusesSettingsThatAreNotFinite) {
  struct Setting {
    std::string words;
    std::function<void(RouterConfig&, double)> set;
  };
  const std::vector<Setting> settings = {
      {"scaling must be finite", [](RouterConfig& c, double value) { c.scaling = value; }},
      {"aux_loss_coeff must be finite",
       [](RouterConfig& c, double value) { c.aux_loss_coeff = value; }},
      {"aux_loss_coeffs.batch must be finite",
       [](RouterConfig& c, double value) { c.aux_loss_coeffs.batch = value; }},
      {"aux_loss_coeffs.sequence must be finite",
       [](RouterConfig& c, double value) { c.aux_loss_coeffs.sequence = value; }},
      {"aux_loss_coeffs.global_batch must be finite",
       [](RouterConfig& c, double value) { c.aux_loss_coeffs.global_batch = value; }},
      {"z_loss_coeff must be finite",
       [](RouterConfig& c, double value) { c.z_loss_coeff = value; }},
      {"jitter must be in [0, 1)", [](RouterConfig& c, double value) { c.jitter = value; }}};
  for (const Setting& setting : settings) {
    for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      RouterConfig config = small_config();
      setting.set(config, value);
      EXPECT_THAT(message_of([&] { const Router router(config); }), HasSubstr(setting.words));
    }
  }
}

TEST(Router, NamesTheTypesThatForcedRoutesMayHave) {
  RouterRun run(make_router_input(small_config(), 3));
  const std::vector<float> floats(3 * 2);
  run.args.forced_ids = {floats.data(), {3, 2}};
  EXPECT_THAT(message_of([&] { (void)run.route(); }),
              HasSubstr("forced_ids must be [3, 2] int32 or int64, got [3, 2] fp32"));
  const std::vector<int64_t> too_many(3 * 3);
  run.args.forced_ids = {too_many.data(), {3, 3}};
  EXPECT_THAT(message_of([&] { (void)run.route(); }),
              HasSubstr("forced_ids must be [3, 2] int32 or int64, got [3, 3] int64"));
}

TEST(Router, NamesTokenAndSlotOfABadForcedRoute) {
  auto input = make_router_input(small_config(), 2);
  input.forced_ids = {0, 1, 2, 4};
  try {
    RouterRun(input).route();
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("forced expert of token 1 slot 1"));
  }
}

TEST(Router, RefusesAForcedExpertThatATokenNamesTwice) {
  auto input = make_router_input(small_config(), 3);
  input.forced_ids = {-1, -1, 0, 1, 2, 2};
  std::vector<int32_t> narrow(input.forced_ids.begin(), input.forced_ids.end());
  const RouterRun run(input);
  RouteArgs args = run.args;
  for (const bool is_wide : {true, false}) {
    if (!is_wide) args.forced_ids = {narrow.data(), {3, 2}};
    try {
      static_cast<void>(run.router().route(args));
      FAIL();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("forced expert of token 2 slot 1 must differ from those "
                                          "of earlier slots, got 2 again"));
    }
  }
}

TEST(Router, RefusesTheOutputOfAnotherRouter) {
  RouterConfig config = small_config();
  config.score = Score::kSigmoid;
  const RouterRun run(make_router_input(config, 3));
  const RouterOutput output = run.route();
  const auto losses = [&](const RouterConfig& other) { (void)Router(other).losses(output); };
  const auto backward = [&](const RouterConfig& other) {
    Router(other).backward({.x = run.args.x, .gate = run.args.gate, .output = &output});
  };
  config.normalise = true;  // the default of kSigmoid
  EXPECT_NO_THROW(losses(config));
  EXPECT_NO_THROW(backward(config));
  const std::vector<std::function<void(RouterConfig&)>> changes = {
      [](RouterConfig& c) { c.score = Score::kSoftmax; },
      [](RouterConfig& c) { c.normalise = false; }, [](RouterConfig& c) { c.scaling = 2.0; },
      [](RouterConfig& c) { c.jitter = 0.25; },
      [](RouterConfig& c) { c.aux_loss_coeffs.sequence = 0.5; }};
  for (const auto& change : changes) {
    RouterConfig other = config;
    change(other);
    const std::string words = "output must come from a router with num_experts=";
    EXPECT_THAT(message_of([&] { losses(other); }), HasSubstr(words));
    EXPECT_THAT(message_of([&] { backward(other); }), HasSubstr(words));
  }
}

TEST(Router, RefusesAGpuThatIsNotThere) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  const Router router({.num_experts = 4, .top_k = 2, .width = 2});
  std::vector<float> memory(16);
  const Device gpu{.kind = DeviceKind::kCuda, .index = 0};
  const RouteArgs args{.x = {memory.data(), {3, 2}, gpu},
                       .gate = {.weight = {memory.data(), {4, 2}, gpu}}};
  EXPECT_THAT(message_of([&] { (void)router.route(args); }, ErrorCode::kUnsupported),
              HasSubstr("CUDA"));
}

}  // namespace
}  // namespace crossdock
