#include <algorithm>

#include "core/check.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "testing/conformance/checks.hpp"
#include "testing/conformance/placed_dispatcher.hpp"

namespace crossdock::conformance {
namespace {

// A rank's input to a worked vector: tokens of width 1, each with K experts, weights 1.
struct Tokens {
  std::vector<double> x;            // [T]
  std::vector<int64_t> expert_ids;  // [T, K]
};

class Worked {
 public:
  /// tokens_of[r] for the first ranks; the others have none.
  Worked(Group& group, const StrategyFactory& strategy, DispatchConfig config,
         const std::vector<Tokens>& tokens_of)
      : rank_(group.rank()), dispatcher_(group, std::move(config), strategy()) {
    if (rank_ < static_cast<int>(tokens_of.size())) tokens_ = tokens_of[static_cast<size_t>(rank_)];
    const Shape slots{std::ssize(tokens_.x), dispatcher_.config().top_k};
    const std::vector<float> weights(tokens_.expert_ids.size(), 1.0F);
    plan_ = dispatcher_.plan(Routing{{tokens_.expert_ids.data(), slots}, {weights.data(), slots}});
  }

  const Plan& plan() const { return plan_; }

  std::vector<double> rows() {
    const OwnedTensor x = reference::to_tensor(DType::kF32, {std::ssize(tokens_.x), 1}, tokens_.x);
    return reference::to_values(dispatcher_.dispatch(plan_, {.x = x.view}).rows);
  }

  // The sums when expert e returns y[e] for every row.
  std::vector<double> out(const std::vector<double>& y) {
    const PlanData& data = plan_.data();
    std::vector<double> values(static_cast<size_t>(plan_.num_rows()), 0.0);
    const Segments segments = plan_.segments();
    for (int64_t i = 0; i < segments.num_segments; ++i) {
      const int64_t first = data.owner_offsets[static_cast<size_t>(rank_)];
      const int32_t expert = data.experts_by_owner[static_cast<size_t>(first + i)];
      std::fill_n(values.begin() + segments.starts[i], segments.counts[i],
                  y[static_cast<size_t>(expert)]);
    }
    const OwnedTensor tensor = reference::to_tensor(DType::kF32, {plan_.num_rows(), 1}, values);
    return reference::to_values(dispatcher_.combine(plan_, tensor.view));
  }

  // Expects `wanted` on rank `where`, and nothing on all others.
  template <typename Value>
  void expect(const char* what, int where, std::vector<Value> got, std::vector<Value> wanted) {
    if (rank_ != where) wanted.clear();
    if (got != wanted) findings.push_back(concat("rank ", rank_, ": ", what, " are wrong"));
  }

  Findings findings;

 private:
  int rank_;
  PlacedDispatcher dispatcher_;
  Tokens tokens_;
  Plan plan_;
};

std::vector<int64_t> counts_of(const Plan& plan) {
  const Segments segments = plan.segments();
  return {segments.counts, segments.counts + segments.num_segments};
}

Findings permute(Group& group, const StrategyFactory& strategy) {
  Worked worked(group, strategy, {.num_experts = 3, .top_k = 2, .width = 1, .placement = {0, 0, 0}},
                {{{0, 1, 2, 3}, {0, 1, 1, 2, 0, 2, 1, 2}}});
  worked.expect<double>("source tokens", 0, worked.rows(), {0, 2, 0, 1, 3, 1, 2, 3});
  worked.expect<int64_t>("rows per expert", 0, counts_of(worked.plan()), {2, 3, 3});
  return worked.findings;
}

// Tokens are numbered in arrival order, [source][expert].
Findings regroup_of_two_sources(Group& group, const StrategyFactory& strategy) {
  if (group.size() < 2) return {};
  Worked worked(group, strategy, {.num_experts = 2, .top_k = 1, .width = 1, .placement = {0, 0}},
                {{{0, 1, 2, 3, 4}, {0, 0, 1, 1, 1}}, {{5, 6, 7, 8, 9}, {0, 1, 1, 1, 1}}});
  worked.expect<double>("rows", 0, worked.rows(), {0, 1, 5, 2, 3, 4, 6, 7, 8, 9});
  worked.expect<int64_t>("rows per expert", 0, counts_of(worked.plan()), {3, 7});
  return worked.findings;
}

Findings regroup_of_four_sources(Group& group, const StrategyFactory& strategy) {
  if (group.size() < 4) return {};
  const std::vector<Tokens> tokens = {
      {{0, 1}, {0, 1}}, {{2, 3}, {0, 1}}, {{4, 5}, {0, 1}}, {{6, 7}, {0, 1}}};
  Worked worked(group, strategy, {.num_experts = 2, .top_k = 1, .width = 1, .placement = {0, 0}},
                tokens);
  worked.expect<double>("rows", 0, worked.rows(), {0, 2, 4, 6, 1, 3, 5, 7});
  return worked.findings;
}

Findings aligned_offsets(Group& group, const StrategyFactory& strategy) {
  Worked worked(
      group, strategy,
      {.num_experts = 4, .top_k = 1, .width = 1, .alignment = 32, .placement = {0, 0, 0, 0}},
      {{{1, 2, 3, 4, 5, 6, 7, 8}, {1, 3, 1, 3, 1, 3, 1, 1}}});
  const Segments segments = worked.plan().segments();
  worked.expect<int64_t>("starts", 0, {segments.starts, segments.starts + segments.num_segments},
                         {0, 0, 32, 32});
  worked.expect<int64_t>("rows per expert", 0, counts_of(worked.plan()), {0, 5, 0, 3});
  if (group.rank() == 0 && worked.plan().num_rows() != 64) {
    worked.findings.push_back("rank 0: the last segment does not end at row 64");
  }
  return worked.findings;
}

// All tokens go to experts 0 and 1, so capacity C drops T - C routes of each.
Findings capacity(Group& group, const StrategyFactory& strategy) {
  struct Known {
    int64_t T;
    double factor;
    int64_t C;
  };
  Findings findings;
  for (const Known& known : {Known{16, 0.5, 2}, Known{16, 0.6, 3}, Known{200, 1.1, 56}}) {
    Tokens tokens;
    for (int64_t t = 0; t < known.T; ++t) {
      tokens.x.push_back(static_cast<double>(t));
      tokens.expert_ids.insert(tokens.expert_ids.end(), {1, 0});
    }
    Worked worked(
        group, strategy,
        {.num_experts = 8, .top_k = 2, .width = 1, .capacity = Capacity{.factor = known.factor}},
        {tokens});
    std::vector<int64_t> dropped(worked.plan().dropped().begin(), worked.plan().dropped().end());
    std::erase(dropped, 0);
    worked.expect<int64_t>("dropped routes", 0, dropped, {known.T - known.C, known.T - known.C});
    findings.insert(findings.end(), worked.findings.begin(), worked.findings.end());
  }
  return findings;
}

// Products 1e8, 1, -1e8: 0 in slot order, 1 if the large ones are added first.
Findings slot_order(Group& group, const StrategyFactory& strategy) {
  Worked worked(group, strategy, {.num_experts = 3, .top_k = 3, .width = 1},
                {{{0, 0, 0}, {0, 1, 2, 0, 2, 1, 1, 0, 2}}});
  worked.expect<double>("sums", 0, worked.out({1e8, 1.0, -1e8}), {0, 1, 0});
  return worked.findings;
}

}  // namespace

std::vector<Check> list_worked_vectors() {
  return {{"vector/permute", true, permute},
          {"vector/regroup_of_two_sources", true, regroup_of_two_sources},
          {"vector/regroup_of_four_sources", true, regroup_of_four_sources},
          {"vector/aligned_offsets", true, aligned_offsets},
          {"vector/capacity", true, capacity},
          {"vector/slot_order", true, slot_order}};
}

}  // namespace crossdock::conformance
