#include "core/check.hpp"
#include "testing/conformance/checks.hpp"
#include "testing/conformance/placed_dispatcher.hpp"
#include "testing/conformance/trial.hpp"
#include "testing/conformance/values.hpp"
#include "testing/conformance/worlds.hpp"

namespace crossdock::conformance {

void expect_same_error(Group& group, const StrategyFactory& strategy,
                       const ErrorExpectation& expected, const std::function<void()>& body,
                       Findings& findings) {
  const auto find = [&](const auto&... parts) {
    findings.push_back(concat("rank ", group.rank(), ": ", parts...));
  };
  std::string message;
  try {
    body();
    find("no error was thrown");
  } catch (const Error& error) {
    message = error.what();
    if (error.code() != expected.code) {
      find("the error is \"", name_of(error.code()), "\", must be \"", name_of(expected.code),
           "\": ", message);
    }
    for (const std::string& word : expected.words) {
      if (message.find(word) == std::string::npos) find("no \"", word, "\" in: ", message);
    }
  }
  group.check();  // an input error must not have poisoned it
  const Agreement all =
      group.agree({.operation = "conformance", .body = std::as_bytes(std::span(message))});
  for (int r = 0; r < group.size(); ++r) {
    const auto bytes = all.body(r);
    const std::string theirs(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (theirs != message) find("rank ", r, " has another message: ", theirs, "; here: ", message);
  }
  const World world =
      make_small_world(std::vector<int64_t>(static_cast<size_t>(group.size()), 3), 4, 1);
  PlacedDispatcher dispatcher(group, world.config, strategy());
  Trial trial(dispatcher, world, 1, findings);
  trial.dispatch();
  trial.combine();
}

namespace {

constexpr int64_t kTokens = 3;
constexpr int64_t kWidth = 4;

DispatchConfig config_of(const Group& group) {
  return {.num_experts = group.size() + 1, .top_k = 2, .width = kWidth};
}

// A rank's tensors for a step that would work.
class Step {
 public:
  explicit Step(const DispatchConfig& config, DType dtype = DType::kF32)
      : top_k_(config.top_k), dtype_(dtype) {
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t k = 0; k < top_k_; ++k) expert_ids_.push_back(static_cast<int32_t>(k));
    }
    weights_.assign(expert_ids_.size(), 1.0F);
  }

  Plan plan(PlacedDispatcher& dispatcher) const {
    const Shape slots{kTokens, top_k_};
    return dispatcher.plan(Routing{{expert_ids_.data(), slots}, {weights_.data(), slots}});
  }

  ConstTensorView x() const {
    return {static_cast<const void*>(memory_.data()), dtype_, {kTokens, kWidth}};
  }

  ConstTensorView rows(const Plan& plan) const {
    return {static_cast<const void*>(memory_.data()), dtype_, {plan.num_rows(), kWidth}};
  }

 private:
  int64_t top_k_;
  DType dtype_;
  std::vector<int32_t> expert_ids_;
  std::vector<float> weights_;
  Buffer memory_{4096};
};

ErrorExpectation mismatch(const Group& group, const char* word) {
  return {ErrorCode::kMismatch, {"rank " + std::to_string(group.size() - 1), word}};
}

bool is_culprit(const Group& group) {
  return group.rank() == group.size() - 1;
}

// The last rank has a different configuration.
Check other_config(const std::string& name, const char* word,
                   const std::function<void(DispatchConfig&)>& change) {
  const auto body = [=](Group& group, const StrategyFactory& strategy) {
    Findings findings;
    if (group.size() < 2) return findings;
    DispatchConfig config = config_of(group);
    if (is_culprit(group)) change(config);
    PlacedDispatcher dispatcher(group, config, strategy());
    const Step step(config);
    expect_same_error(
        group, strategy, mismatch(group, word), [&] { step.plan(dispatcher); }, findings);
    return findings;
  };
  return {"mismatch/" + name, true, body};
}

using Call = std::function<void(PlacedDispatcher&, const Plan&, const Step&)>;

// The last rank makes a different call.
Check other_call(const std::string& name, const char* word, const Call& right, const Call& wrong) {
  const auto body = [=](Group& group, const StrategyFactory& strategy) {
    Findings findings;
    if (group.size() < 2) return findings;
    const Step step(config_of(group));
    PlacedDispatcher dispatcher(group, config_of(group), strategy());
    const Plan plan = step.plan(dispatcher);
    const Call& call = is_culprit(group) ? wrong : right;
    expect_same_error(
        group, strategy, mismatch(group, word), [&] { call(dispatcher, plan, step); }, findings);
    return findings;
  };
  return {"mismatch/" + name, true, body};
}

void dispatch(PlacedDispatcher& dispatcher, const Plan& plan, const Step& step) {
  dispatcher.dispatch(plan, {.x = step.x()});
}

void combine(PlacedDispatcher& dispatcher, const Plan& plan, const Step& step) {
  static_cast<void>(dispatcher.combine(plan, step.rows(plan)));
}

std::vector<Check> other_configs() {
  return {
      other_config("experts", "num_experts", [](DispatchConfig& c) { c.num_experts += 1; }),
      other_config("top_k", "top_k", [](DispatchConfig& c) { c.top_k = 1; }),
      other_config("width", "width", [](DispatchConfig& c) { c.width = kWidth + 1; }),
      other_config("alignment", "alignment", [](DispatchConfig& c) { c.alignment = 8; }),
      other_config("capacity", "capacity",
                   [](DispatchConfig& c) { c.capacity = Capacity{.factor = 2.0}; }),
      other_config(
          "placement", "placement",
          [](DispatchConfig& c) { c.placement.assign(static_cast<size_t>(c.num_experts), 0); }),
      other_config("partial_sums", "partial_sums",
                   [](DispatchConfig& c) { c.partial_sums = PartialSums::kF32; }),
      other_config("partial_sums_in_row_type", "partial_sums",
                   [](DispatchConfig& c) { c.partial_sums = PartialSums::kRowType; }),
      other_config("nonfinite", "nonfinite",
                   [](DispatchConfig& c) { c.nonfinite = NonFinite::kPropagate; }),
      other_config("max_rows", "max_rows", [](DispatchConfig& c) { c.max_rows = 1000; }),
      other_config("keep_empty_segments", "keep_empty_segments",
                   [](DispatchConfig& c) { c.keep_empty_segments = true; }),
      other_config("copies", "copies", [](DispatchConfig& c) { c.copies = Copies::kPerRank; }),
  };
}

std::vector<Check> other_calls() {
  return {
      other_call("combine_for_dispatch", "combine", dispatch, combine),
      other_call("dispatch_for_combine", "dispatch", combine, dispatch),
      other_call("backward_for_forward", "dispatch_backward", combine,
                 [](PlacedDispatcher& dispatcher, const Plan& plan, const Step& step) {
                   static_cast<void>(dispatcher.dispatch_backward(plan, step.rows(plan)));
                 }),
      other_call("unweighted_for_weighted", "combine_unweighted", combine,
                 [](PlacedDispatcher& dispatcher, const Plan& plan, const Step& step) {
                   static_cast<void>(dispatcher.combine_unweighted(plan, step.rows(plan)));
                 }),
      other_call("plan_for_dispatch", "plan", dispatch,
                 [](PlacedDispatcher& dispatcher, const Plan&, const Step& step) {
                   step.plan(dispatcher);
                 }),
      other_call("dtype", "dtype", dispatch,
                 [](PlacedDispatcher& dispatcher, const Plan& plan, const Step&) {
                   const Step other(dispatcher.config(), DType::kBF16);
                   dispatcher.dispatch(plan, {.x = other.x()});
                 }),
      other_call("row_weights", "row_weights", dispatch,
                 [](PlacedDispatcher& dispatcher, const Plan& plan, const Step& step) {
                   dispatcher.dispatch(plan, {.x = step.x(), .with_row_weights = true});
                 }),
  };
}

// Two plans in flight, and the last rank uses the other one.
Findings other_plan(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  if (group.size() < 2) return findings;
  const Step step(config_of(group));
  PlacedDispatcher dispatcher(group, config_of(group), strategy());
  const Plan first = step.plan(dispatcher);
  const Plan second = step.plan(dispatcher);
  expect_same_error(
      group, strategy, mismatch(group, "plan"),
      [&] { dispatch(dispatcher, is_culprit(group) ? first : second, step); }, findings);
  return findings;
}

// The last rank refuses its input in a different call: all ranks report the same cause.
Findings bad_input_at_another_step(Group& group, const StrategyFactory& strategy) {
  Findings findings;
  if (group.size() < 2) return findings;
  const Step step(config_of(group));
  PlacedDispatcher dispatcher(group, config_of(group), strategy());
  const Plan plan = step.plan(dispatcher);
  const auto body = [&] {
    if (is_culprit(group)) {
      static_cast<void>(dispatcher.combine(plan, step.x()));
    } else {
      dispatch(dispatcher, plan, step);
    }
  };
  expect_same_error(group, strategy, mismatch(group, "combine"), body, findings);
  return findings;
}

}  // namespace

std::vector<Check> list_mismatches() {
  std::vector<Check> checks = {
      {"mismatch/other_plan", true, other_plan},
      {"mismatch/bad_input_at_another_step", true, bad_input_at_another_step}};
  for (auto& part : {other_configs(), other_calls()}) {
    checks.insert(checks.end(), part.begin(), part.end());
  }
  return checks;
}

}  // namespace crossdock::conformance
