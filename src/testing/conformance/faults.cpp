#include "crossdock/testing/faults.hpp"

#include <csignal>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/forwarding_strategy.hpp"
#include "crossdock/testing/conformance.hpp"
#include "testing/conformance/worlds.hpp"

namespace crossdock::conformance {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kTokens = 24;
constexpr int64_t kExperts = 8;
constexpr int64_t kTopK = 2;
constexpr int64_t kWidth = 16;

/// Makes the culprit fail at the step of the fault.
class Injector {
 public:
  Injector(FaultCase fault, bool is_culprit, std::chrono::nanoseconds deadline)
      : fault_(std::move(fault)), is_culprit_(is_culprit), deadline_(deadline) {}

  /// Called between calls, or inside a call of `inside`. Throws, sleeps or kills the process if the
  /// fault is due here.
  void pass(FaultStep step, Group* inside = nullptr) const {
    if (fault_.step == step) reached_ = Clock::now();
    if (!is_due(step)) return;
    if (fault_.kind == FaultKind::kThrows) throw std::runtime_error("a fault put in on purpose");
    if (fault_.kind == FaultKind::kLeaves) {
      if (inside != nullptr) inside->leave("left in the middle of a call");
      throw Leaving();
    }
    if (fault_.kind == FaultKind::kStalls) std::this_thread::sleep_for(2 * deadline_);
    if (fault_.kind == FaultKind::kKilled) std::raise(SIGKILL);
  }
  bool skips(FaultStep step) const { return is_due(step) && fault_.kind == FaultKind::kSkips; }
  bool has_other_config(FaultStep step) const {
    return is_due(step) && fault_.kind == FaultKind::kOtherConfig;
  }

  FaultStep step() const { return fault_.step; }
  /// When this rank, culprit or not, reached the step of the fault.
  Clock::time_point reached() const { return reached_; }

  struct Leaving {};  // unwinds the culprit's step, so that it leaves its group

 private:
  bool is_due(FaultStep step) const { return is_culprit_ && fault_.step == step; }

  FaultCase fault_;
  bool is_culprit_;
  std::chrono::nanoseconds deadline_;
  mutable Clock::time_point reached_ = Clock::now();
};

/// A strategy that runs the injector when all ranks are inside a call.
class Interrupted : public ForwardingStrategy {
 public:
  Interrupted(std::unique_ptr<Strategy> inner, const Injector& injector)
      : ForwardingStrategy(std::move(inner)), injector_(injector) {}

  std::shared_ptr<const void> prepare(const StrategyCall& strategy_call) override {
    injector_.pass(FaultStep::kAfterCounts, &strategy_call.group);
    return inner().prepare(strategy_call);
  }
  void scatter(const StrategyCall& strategy_call, std::span<const RowPart> parts) override {
    const bool backward = std::string_view(strategy_call.operation) == "combine_backward";
    const auto step = backward ? FaultStep::kMidCombineBackward : FaultStep::kMidDispatch;
    injector_.pass(step, &strategy_call.group);
    if (!injector_.skips(step)) inner().scatter(strategy_call, parts);
  }
  void scatter_chunks(const StrategyCall& strategy_call, std::span<const RowPart> parts,
                      std::span<const ExpertChunk> chunks,
                      const std::function<void(size_t)>& arrived) override {
    inner().scatter_chunks(strategy_call, parts, chunks, [&](size_t i) {
      arrived(i);
      if (i == 0) injector_.pass(FaultStep::kBetweenChunks, &strategy_call.group);
    });
  }
  void gather_sum(const StrategyCall& strategy_call, const GatherSumArgs& args) override {
    const bool backward = std::string_view(strategy_call.operation) == "dispatch_backward";
    const auto step = backward ? FaultStep::kMidDispatchBackward : FaultStep::kMidCombine;
    injector_.pass(step, &strategy_call.group);
    if (!injector_.skips(step)) inner().gather_sum(strategy_call, args);
  }

 private:
  const Injector& injector_;
};

/// The call in which a survivor detects the fault.
std::string_view operation_at(FaultStep step) {
  switch (step) {
    case FaultStep::kBeforeCounts:
    case FaultStep::kAfterCounts:
      return "plan";
    case FaultStep::kBeforeDispatch:
    case FaultStep::kMidDispatch:
    case FaultStep::kBetweenChunks:
      return "dispatch";
    case FaultStep::kBeforeCombine:
    case FaultStep::kMidCombine:
      return "combine";
    case FaultStep::kMidCombineBackward:
      return "combine_backward";
    case FaultStep::kMidDispatchBackward:
      return "dispatch_backward";
  }
  return "";
}

/// Forward and backward of one routing.
void run_step(Group& group, const std::string& strategy, const Injector& injector) {
  const DispatchConfig config{
      .num_experts = kExperts,
      .top_k = kTopK,
      .width = kWidth,
      .alignment = injector.has_other_config(FaultStep::kBeforeCounts) ? 8 : 1,
      .capacity = {},
      .placement = {},
      .max_rows = {}};
  Dispatcher dispatcher(group, config,
                        std::make_unique<Interrupted>(make_strategy(strategy), injector));
  std::vector<int32_t> ids(static_cast<size_t>(kTokens * kTopK));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % kExperts);
  const std::vector<float> weights(ids.size(), 0.5F);
  const std::vector<float> x(static_cast<size_t>(kTokens * kWidth), 1.0F);
  const std::vector<double> wide_x(x.begin(), x.end());
  const ConstTensorView tokens(x.data(), {kTokens, kWidth});

  injector.pass(FaultStep::kBeforeCounts);
  Plan plan;
  if (!injector.skips(FaultStep::kBeforeCounts)) {
    plan = dispatcher.plan({.expert_ids = ConstTensorView(ids.data(), {kTokens, kTopK}),
                            .weights = ConstTensorView(weights.data(), {kTokens, kTopK}),
                            .mask = {}});
  }
  injector.pass(FaultStep::kBeforeDispatch);
  OwnedTensor rows;
  if (!injector.skips(FaultStep::kBeforeDispatch)) {
    DispatchArgs args;
    args.x = injector.has_other_config(FaultStep::kBeforeDispatch)
                 ? ConstTensorView(wide_x.data(), {kTokens, kWidth})
                 : tokens;
    args.num_chunks = injector.step() == FaultStep::kBetweenChunks ? 2 : 1;
    rows = dispatcher.dispatch(plan, args).rows;
  } else {
    rows = dispatcher.allocate_rows(plan, DType::kF32);
  }
  injector.pass(FaultStep::kBeforeCombine);
  if (!injector.skips(FaultStep::kBeforeCombine)) {
    if (injector.has_other_config(FaultStep::kBeforeCombine)) {
      const OwnedTensor wide = dispatcher.allocate_rows(plan, DType::kBF16);
      static_cast<void>(dispatcher.combine(plan, wide.view));
    } else {
      static_cast<void>(dispatcher.combine(plan, rows.view));
    }
  }
  static_cast<void>(dispatcher.combine_backward(plan, tokens, rows.view));
  static_cast<void>(dispatcher.dispatch_backward(plan, rows.view));
}

bool is_between_calls(FaultStep step) {
  return step == FaultStep::kBeforeCounts || step == FaultStep::kBeforeDispatch ||
         step == FaultStep::kBeforeCombine;
}

// Whether the ranks detect the fault together, before anything has moved, and keep using the group.
bool is_agreed(const FaultCase& fault) {
  return fault.kind == FaultKind::kOtherConfig ||
         (fault.kind == FaultKind::kSkips && is_between_calls(fault.step));
}

bool can_happen(FaultKind kind, FaultStep step) {
  if (kind == FaultKind::kOtherConfig) return is_between_calls(step);
  if (kind != FaultKind::kSkips) return true;
  // Without a complete plan the culprit cannot continue, and a chunk is not a call to skip.
  return step != FaultStep::kBeforeCounts && step != FaultStep::kAfterCounts &&
         step != FaultStep::kBetweenChunks;
}

// Checks a survivor's error.
void judge_error(const FaultCase& fault, const Error& error, FaultOutcome& outcome) {
  outcome.message = error.what();
  const bool is_named = outcome.message.find(concat("rank ", fault.culprit)) != std::string::npos;
  const bool is_culprit = error.context().culprit == fault.culprit;
  // Ranks that make different exchanges inside a call blame each other.
  if (fault.kind == FaultKind::kSkips && !is_between_calls(fault.step)) {
    if (is_named || is_culprit) return;
  }
  if (!is_culprit || !is_named) {
    outcome.findings.push_back(concat("the error must name rank ", fault.culprit,
                                      ", it names rank ", error.context().culprit, ": ",
                                      outcome.message));
  }
  // If nothing is exchanged after the counts, or after the first chunk, the next call detects the
  // fault.
  const std::string_view operation = error.context().operation;
  const bool is_next = (fault.step == FaultStep::kAfterCounts && operation == "dispatch") ||
                       (fault.step == FaultStep::kBetweenChunks && operation == "combine");
  if (operation != operation_at(fault.step) && !is_next) {
    outcome.findings.push_back(concat("the error must be about ", operation_at(fault.step),
                                      ", it is about ", operation, ": ", outcome.message));
  }
}

// Checks the results of the survivors' group or, after an agreed error, of the same group.
void judge_recovery(Group& group, const FaultCase& fault, FaultOutcome& outcome) {
  std::vector<int> members;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != fault.culprit || is_agreed(fault)) members.push_back(rank);
  }
  const std::unique_ptr<Group> fresh = is_agreed(fault) ? nullptr : group.subgroup(members);
  Group& working = fresh ? *fresh : group;
  const World world = make_world(RoutingKind::kUnequalCounts, Variant::kPlain, DType::kF32,
                                 static_cast<int>(members.size()));
  for (const std::string& finding : judge(
           working, [&] { return make_strategy(fault.strategy); }, world)) {
    outcome.findings.push_back(concat("after the fault: ", finding));
  }
}

}  // namespace

std::string FaultCase::name() const {
  return concat(strategy, "/", kFaultNames[static_cast<size_t>(kind)], "/",
                kFaultStepNames[static_cast<size_t>(step)]);
}

std::vector<FaultCase> list_faults(const std::vector<std::string>& strategies, int culprit) {
  std::vector<FaultCase> cases;
  for (const std::string& strategy : strategies) {
    for (size_t k = 0; k < kFaultNames.size(); ++k) {
      for (size_t s = 0; s < kFaultStepNames.size(); ++s) {
        const auto kind = static_cast<FaultKind>(k);
        const auto step = static_cast<FaultStep>(s);
        if (!can_happen(kind, step)) continue;
        cases.push_back({.strategy = strategy, .kind = kind, .step = step, .culprit = culprit});
      }
    }
  }
  return cases;
}

FaultOutcome run_fault(Group& base, const FaultCase& fault, std::chrono::nanoseconds deadline) {
  std::vector<int> everybody(static_cast<size_t>(base.size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  GroupOptions options = base.options();
  options.arrival_deadline = deadline;
  options.progress_deadline = deadline;
  const bool is_culprit = base.rank() == fault.culprit;
  const Injector injector(fault, is_culprit, deadline);
  FaultOutcome outcome;
  {
    Group group(base.communicator().subgroup(everybody), options);
    try {
      run_step(group, fault.strategy, injector);
      // A culprit that skips the inside of the last call has made all its calls.
      if (!is_culprit || is_agreed(fault)) {
        outcome.findings.emplace_back("the step ended without an error");
      }
    } catch (const Error& error) {
      outcome.latency = Clock::now() - injector.reached();
      if (!is_culprit) judge_error(fault, error, outcome);
      outcome.message = error.what();
    } catch (const std::exception& error) {
      outcome.message = error.what();
    } catch (const Injector::Leaving&) {
      outcome.message = "left";
    }
    if (!is_culprit || is_agreed(fault)) {
      judge_recovery(group, fault, outcome);
    } else {
      group.leave(outcome.message);
    }
  }
  if (fault.kind == FaultKind::kKilled) return outcome;
  base.agree({.operation = "end of fault"});
  return outcome;
}

}  // namespace crossdock::conformance
