#include <cstring>
#include <limits>

#include "testing/conformance/checks.hpp"
#include "testing/conformance/placed_dispatcher.hpp"

namespace crossdock::conformance {
namespace {

constexpr int64_t kTokens = 4;
constexpr int64_t kTopK = 2;
constexpr int64_t kExperts = 6;
constexpr int64_t kWidth = 3;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Everything that one rank passes in a step. A bad input changes it on the last rank, before or
// after the plan is made.
struct Step {
  std::vector<int64_t> expert_ids;  // [T, K]
  std::vector<double> weights;      // [T, K]
  Shape ids_shape{kTokens, kTopK};
  DType id_dtype = DType::kI64;
  DType weight_dtype = DType::kF32;
  Shape mask_shape;  // no mask if its rank is 0

  Shape x_shape{kTokens, kWidth};
  DType x_dtype = DType::kF32;
  bool with_scales = false;
  int64_t more_rows = 0;  // extra rows in the caller's rows, y, rows to collect
  DType y_dtype = DType::kF32;
  Shape out_shape{kTokens, kWidth};
  DType grad_dtype = DType::kF32;
  bool null_pointers = false;  // for ids and x
};

Step good_step() {
  Step step;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t k = 0; k < kTopK; ++k) {
      step.expert_ids.push_back((2 * t + k) % kExperts);
      step.weights.push_back(0.5 + static_cast<double>(t));
    }
  }
  return step;
}

// Memory for a view of any shape and dtype.
struct Memory {
  Buffer buffer{4096};
  TensorView view(DType dtype, Shape shape) const {
    return {static_cast<void*>(buffer.data()), dtype, shape};
  }
};

Plan make_plan(PlacedDispatcher& dispatcher, const Step& step) {
  std::vector<double> ids(step.expert_ids.begin(), step.expert_ids.end());
  std::vector<double> weights = step.weights;
  ids.resize(static_cast<size_t>(step.ids_shape.num_elements()), 0.0);
  weights.resize(ids.size(), 0.0);
  const Shape weight_shape{kTokens, kTopK};
  weights.resize(static_cast<size_t>(weight_shape.num_elements()));
  const OwnedTensor id_tensor = reference::to_tensor(step.id_dtype, step.ids_shape, ids);
  const OwnedTensor weight_tensor = reference::to_tensor(step.weight_dtype, weight_shape, weights);
  const Memory mask;
  std::memset(mask.buffer.data(), 0, 64);
  Routing routing{.expert_ids = id_tensor.view, .weights = weight_tensor.view};
  if (step.null_pointers) routing.expert_ids.data = nullptr;
  if (step.mask_shape.rank() > 0) routing.mask = mask.view(DType::kBool, step.mask_shape);
  return dispatcher.plan(routing);
}

// Runs a whole step; the first call that gets a bad input reports the error.
void run_step(PlacedDispatcher& dispatcher, const Step& step) {
  const Memory tokens;
  const Memory scales;
  const Memory rows;
  const Memory out;
  const Plan plan = make_plan(dispatcher, step);
  const Shape rows_shape{plan.num_rows() + step.more_rows, kWidth};
  DispatchArgs args{.x = tokens.view(step.x_dtype, step.x_shape)};
  if (step.with_scales) args.scales = scales.view(DType::kF32, {kTokens, 1});
  dispatcher.dispatch(plan, args);
  const TensorView y = rows.view(step.y_dtype, rows_shape);
  dispatcher.combine(plan, y, out.view(DType::kF32, step.out_shape));
  static_cast<void>(dispatcher.dispatch_backward(plan, y));
  static_cast<void>(
      dispatcher.combine_backward(plan, tokens.view(step.grad_dtype, {kTokens, kWidth}), y));
  static_cast<void>(dispatcher.collect_routes(plan, rows.view(DType::kF32, {rows_shape[0]})));
}

DispatchConfig good_config() {
  return {.num_experts = kExperts, .top_k = kTopK, .width = kWidth};
}

using Spoil = std::function<void(Step&)>;

// A check in which only the last rank has a bad input.
Check bad_step(const std::string& name, const std::vector<std::string>& words, const Spoil& spoil,
               const DispatchConfig& config = good_config()) {
  const auto body = [=](Group& group, const StrategyFactory& strategy) {
    Findings findings;
    const int culprit = group.size() - 1;
    ErrorExpectation expected{ErrorCode::kInvalidArgument, words};
    expected.words.push_back("rank " + std::to_string(culprit));
    PlacedDispatcher dispatcher(group, config, strategy());
    Step step = good_step();
    if (group.rank() == culprit) spoil(step);
    expect_same_error(
        group, strategy, expected, [&] { run_step(dispatcher, step); }, findings);
    return findings;
  };
  return {"error/" + name, true, body};
}

// A check in which all ranks have the same wrong configuration.
Check bad_config(const std::string& name, const ErrorExpectation& expected,
                 const std::function<void(DispatchConfig&)>& spoil) {
  const auto body = [=](Group& group, const StrategyFactory& strategy) {
    Findings findings;
    const auto run = [&] {
      DispatchConfig config = good_config();
      spoil(config);
      PlacedDispatcher dispatcher(group, config, strategy());
      run_step(dispatcher, good_step());
    };
    expect_same_error(group, strategy, expected, run, findings);
    return findings;
  };
  return {"error/config_" + name, true, body};
}

std::vector<Check> bad_routings() {
  return {
      bad_step("id_too_large", {"token 1", "slot 1", "6"}, [](Step& s) { s.expert_ids[3] = 6; }),
      bad_step("id_below_minus_one", {"token 2", "slot 0", "-2"},
               [](Step& s) { s.expert_ids[4] = -2; }),
      bad_step("id_beyond_32_bits", {"token 0", "slot 1", "4294967297"},
               [](Step& s) { s.expert_ids[1] = (int64_t{1} << 32) + 1; }),
      bad_step("repeated_id", {"token 3", "slot 1"},
               [](Step& s) { s.expert_ids[7] = s.expert_ids[6]; }),
      bad_step("nan_weight", {"token 1", "slot 0", "NaN"}, [](Step& s) { s.weights[2] = kNan; }),
      bad_step("infinite_weight", {"token 3", "slot 1", "Infinity"},
               [](Step& s) { s.weights[7] = std::numeric_limits<double>::infinity(); }),
      bad_step("shape_of_ids", {"[4, 3]"},
               [](Step& s) {
                 s.ids_shape = {kTokens, kTopK + 1};
               }),
      bad_step("rows_of_ids", {"weights"},
               [](Step& s) {
                 s.ids_shape = {kTokens - 1, kTopK};
               }),
      bad_step("dtype_of_ids", {"fp32"}, [](Step& s) { s.id_dtype = DType::kF32; }),
      bad_step("dtype_of_weights", {"weights", "fp8_e4m3"},
               [](Step& s) { s.weight_dtype = DType::kF8E4M3; }),
      bad_step("shape_of_mask", {"mask", "[5]"}, [](Step& s) { s.mask_shape = {kTokens + 1}; }),
      bad_step("null_ids", {"null"}, [](Step& s) { s.null_pointers = true; }),
  };
}

std::vector<Check> bad_tensors() {
  return {
      bad_step("width_of_x", {"x", "[4, 4]"},
               [](Step& s) {
                 s.x_shape = {kTokens, kWidth + 1};
               }),
      bad_step("rows_of_x", {"x", "[3, 3]"},
               [](Step& s) {
                 s.x_shape = {kTokens - 1, kWidth};
               }),
      bad_step("dtype_of_x", {"x", "int32"}, [](Step& s) { s.x_dtype = DType::kI32; }),
      bad_step("scales_without_fp8", {"scales"}, [](Step& s) { s.with_scales = true; }),
      bad_step("rows_of_y", {"rows"}, [](Step& s) { s.more_rows = 1; }),
      bad_step("dtype_of_y", {"rows", "fp8_e4m3"}, [](Step& s) { s.y_dtype = DType::kF8E4M3; }),
      bad_step("shape_of_out", {"out", "[5, 3]"},
               [](Step& s) {
                 s.out_shape = {kTokens + 1, kWidth};
               }),
      bad_step("dtype_of_grad_out", {"grad_out"}, [](Step& s) { s.grad_dtype = DType::kBF16; }),
  };
}

std::vector<Check> bad_configs() {
  const auto invalid = [](std::vector<std::string> words) {
    return ErrorExpectation{ErrorCode::kInvalidArgument, std::move(words)};
  };
  return {
      bad_config("more_routes_than_experts", invalid({"top_k (7)", "num_experts (6)"}),
                 [](DispatchConfig& c) { c.top_k = 7; }),
      bad_config("no_experts", invalid({"num_experts"}),
                 [](DispatchConfig& c) { c.num_experts = 0; }),
      bad_config("fewer_routes_than_top_k", invalid({"max_routes_per_token", "top_k (2)", "got 1"}),
                 [](DispatchConfig& c) { c.max_routes_per_token = 1; }),
      bad_config("no_width", invalid({"width"}), [](DispatchConfig& c) { c.width = 0; }),
      bad_config("alignment", invalid({"alignment", "12"}),
                 [](DispatchConfig& c) { c.alignment = 12; }),
      bad_config("placement_off_the_group", invalid({"placement", "99"}),
                 [](DispatchConfig& c) { c.placement = {0, 0, 0, 99, 0, 0}; }),
      bad_config("placement_too_short", invalid({"placement"}),
                 [](DispatchConfig& c) {
                   c.placement = {0, 0};
                 }),
      bad_config("negative_capacity", invalid({"factor", "-1"}),
                 [](DispatchConfig& c) { c.capacity = Capacity{.factor = -1.0}; }),
      bad_config("pad_without_max_tokens", invalid({"max_tokens"}),
                 [](DispatchConfig& c) { c.capacity = Capacity{.pad_to_capacity = true}; }),
      bad_config("more_tokens_than_max_tokens", invalid({"max_tokens (2)"}),
                 [](DispatchConfig& c) {
                   c.capacity = Capacity{.pad_to_capacity = true, .max_tokens = 2};
                 }),
      bad_config("max_rows", {ErrorCode::kCapacity, {"max_rows"}},
                 [](DispatchConfig& c) { c.max_rows = 1; }),
  };
}

Findings too_many_bits(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  const int culprit = group.size() - 1;
  std::vector<double> map(static_cast<size_t>(kTokens * kExperts), 0.0);
  for (size_t i = 0; group.rank() == culprit && i < 3; ++i) map[kExperts + 2 * i] = 1.0;
  const Shape shape{kTokens, kExperts};
  const OwnedTensor map_tensor = reference::to_tensor(DType::kBool, shape, map);
  const OwnedTensor weights = reference::to_tensor(DType::kF32, shape, map);
  DispatchConfig config = good_config();
  config.max_routes_per_token = 2;
  PlacedDispatcher dispatcher(group, config, strategy());
  const ErrorExpectation expected{
      ErrorCode::kInvalidArgument,
      {"rank " + std::to_string(culprit), "token 1", "3 experts", "max_routes_per_token (2)"}};
  expect_same_error(
      group, strategy, expected,
      [&] {
        static_cast<void>(dispatcher.plan(DenseRouting{map_tensor.view, weights.view}));
      },
      findings);
  return findings;
}

Findings unknown_strategy(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  PlacedDispatcher dispatcher(group, good_config(), "teleport");
  expect_same_error(
      group, strategy, {ErrorCode::kInvalidArgument, {"teleport", "alltoall"}},
      [&] { run_step(dispatcher, good_step()); }, findings);
  return findings;
}

Findings empty_plan(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  PlacedDispatcher dispatcher(group, good_config(), strategy());
  const Memory x;
  expect_same_error(
      group, strategy, {ErrorCode::kInvalidArgument, {"plan"}},
      [&] {
        dispatcher.dispatch(Plan{}, {.x = x.view(DType::kF32, {kTokens, kWidth})});
      },
      findings);
  return findings;
}

}  // namespace

std::vector<Check> list_bad_inputs() {
  std::vector<Check> checks = {{"error/too_many_bits_in_a_map", true, too_many_bits},
                               {"error/unknown_strategy", true, unknown_strategy},
                               {"error/empty_plan", true, empty_plan}};
  for (auto& part : {bad_routings(), bad_tensors(), bad_configs()}) {
    checks.insert(checks.end(), part.begin(), part.end());
  }
  return checks;
}

}  // namespace crossdock::conformance
