// Your own strategy, in one file: checked by the suite that checks Crossdock's strategies, planned
// by the planner, chosen by "auto", and used by a dispatcher.
//
// "rounds" sends at most 8 rows to each rank at a time, so that staging memory does not grow with
// tokens. It leaves everything else to another strategy.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <crossdock/crossdock.hpp>
#include <crossdock/extend/strategy.hpp>
#include <crossdock/testing/conformance.hpp>
#include <cstdio>
#include <cstring>

using namespace crossdock;

namespace {

constexpr int64_t kRows = 8;  // to each rank in a round

// The cost model for "auto" and the planner. The strategy sends what alltoall sends (the default),
// but in rounds, and holds the rows of one round at a time.
class RoundsModel : public StrategyModel {
 public:
  MessageModel messages(Movement movement, double row_bytes,
                        const StrategyJob& job) const override {
    MessageModel model = StrategyModel::messages(movement, row_bytes, job);
    if (!is_scatter(movement)) return model;
    const std::vector<double>& rows = model.rows_per_token;
    const double most = job.tokens * *std::max_element(rows.begin(), rows.end());
    model.rounds = std::max(1.0, std::ceil(most / kRows));
    return model;
  }

  void trace_rows(Movement movement, double row_bytes, const StepSizes& sizes,
                  const StrategyJob& job, MemoryTrace& trace) const override {
    if (!is_scatter(movement)) {
      return StrategyModel::trace_rows(movement, row_bytes, sizes, job, trace);
    }
    const double most = kRows * job.num_ranks();
    trace.exchange(std::min(sizes.sent, most) * row_bytes,
                   std::min(sizes.received, most) * row_bytes);
  }
};

class Rounds : public Strategy {
 public:
  std::string_view name() const override { return "rounds"; }

  const StrategyModel& model() const override { return model_; }

  // The state that the other strategy keeps in a plan.
  std::shared_ptr<const void> prepare(const StrategyCall& call) override {
    return other_->prepare(call);
  }

  // Every row goes to rank `owner`, into the place that the plan gives it there.
  void scatter(const StrategyCall& call, std::span<const RowPart> parts) override {
    // All ranks know all counts, so they make the same number of rounds.
    const int64_t most = most_rows_of_a_pair(call.plan.data());
    for (const RowPart& part : parts) {
      for (int64_t begin = 0; begin < most; begin += kRows) run_round(call, part, begin);
    }
  }

  void gather_sum(const StrategyCall& call, const GatherSumArgs& args) override {
    other_->gather_sum(call, args);
  }
  void gather_partial_sums(const StrategyCall& call, const GatherSumArgs& args) override {
    other_->gather_partial_sums(call, args);
  }

 private:
  static int64_t most_rows_of_a_pair(const PlanData& plan) {
    std::vector<int64_t> rows(static_cast<size_t>(plan.P) * static_cast<size_t>(plan.P));
    for (int64_t source = 0; source < plan.P; ++source) {
      for (int64_t e = 0; e < plan.E; ++e) {
        const int64_t owner = plan.owner[static_cast<size_t>(e)];
        rows[static_cast<size_t>(source * plan.P + owner)] +=
            plan.counts[static_cast<size_t>(source * plan.E + e)];
      }
    }
    return *std::max_element(rows.begin(), rows.end());
  }

  // Byte offsets by rank of the round's rows: up to kRows of each rank's rows, from row `begin` on.
  static std::vector<int64_t> round_offsets(std::span<const int64_t> offsets, int64_t begin,
                                            int64_t row_bytes) {
    std::vector<int64_t> result = {0};
    for (size_t r = 0; r + 1 < offsets.size(); ++r) {
      const int64_t left = std::clamp<int64_t>(offsets[r + 1] - offsets[r] - begin, 0, kRows);
      result.push_back(result.back() + left * row_bytes);
    }
    return result;
  }

  static void run_round(const StrategyCall& call, const RowPart& part, int64_t begin) {
    const PlanData& plan = call.plan.data();
    const int64_t bytes = part.row_bytes;
    const std::vector<int64_t> send_offsets = round_offsets(plan.send_offsets, begin, bytes);
    const std::vector<int64_t> recv_offsets = round_offsets(plan.recv_offsets, begin, bytes);
    const Buffer send = call.group.pool().take_scratch(send_offsets.back());
    const Buffer recv = call.group.pool().take_scratch(recv_offsets.back());
    const auto size = [&](const std::vector<int64_t>& offsets, size_t r) {
      return (offsets[r + 1] - offsets[r]) / bytes;
    };
    for (size_t r = 0; r < static_cast<size_t>(plan.P); ++r) {
      for (int64_t i = 0; i < size(send_offsets, r); ++i) {
        const int64_t route =
            plan.sent_routes[static_cast<size_t>(plan.send_offsets[r] + begin + i)];
        std::memcpy(send.data() + send_offsets[r] + i * bytes, part.tokens + route / plan.K * bytes,
                    static_cast<size_t>(bytes));
      }
    }
    call.group.all_to_all_v({send.data(), send.num_bytes(), send.owner()}, send_offsets,
                            {recv.data(), recv.num_bytes(), recv.owner()}, recv_offsets,
                            call.group.wait_context(call.operation, call.sequence));
    for (const RowBlock& block : plan.recv_blocks) {
      const auto r = static_cast<size_t>(block.source);
      const int64_t first = plan.recv_offsets[r] + begin;  // first arrival of the round
      for (int64_t i = 0; i < size(recv_offsets, r); ++i) {
        const int64_t within = first + i - block.arrival;
        if (within < 0 || within >= block.count) continue;
        std::memcpy(part.rows + (block.row + within) * bytes,
                    recv.data() + recv_offsets[r] + i * bytes, static_cast<size_t>(bytes));
      }
    }
  }

  RoundsModel model_;
  std::unique_ptr<Strategy> other_ = make_strategy("alltoall");
};

std::unique_ptr<Strategy> make_rounds() {
  return std::make_unique<Rounds>();
}

// The number of checks that failed, on all ranks together.
size_t judge() {
  std::vector<conformance::Check> checks = conformance::list_checks();
  std::erase_if(checks, [](const conformance::Check& check) { return !check.is_quick; });
  std::atomic<size_t> num_failures = 0;
  run_ranks(3, [&](Group& group) {
    const conformance::Report report = conformance::run_checks(group, make_rounds, checks);
    for (const conformance::Failure& failure : report.failures) {
      std::printf("%s: %s\n", failure.check.c_str(), failure.message.c_str());
    }
    num_failures += report.failures.size();
  });
  std::printf("rounds: %zu checks, %zu failures\n", checks.size(), num_failures.load());
  return num_failures;
}

// Its cost in a job, compared with the other strategies.
void plan() {
  StrategyList candidates = built_in_strategies();
  candidates.add(make_rounds);
  JobDescription job{.width = 2048, .num_experts = 128, .top_k = 8};
  job.tokens = 8192;
  job.ranks_per_node = 8;
  const JobPlan plan = plan_job(job, candidates);
  for (const StrategyCost& cost : plan.costs.strategies) {
    std::printf("%-12s %6.2f ms per step, %5.2f GB%s\n", cost.name.c_str(),
                1e3 * cost.step_serial_s, cost.memory.expected.total() / 1e9,
                cost.name == plan.choice.name ? "  <- auto" : "");
  }
}

// Of two equally fast candidates, "auto" chooses the earlier one. One token of each rank goes to
// expert 0 and returns.
bool dispatch_with_auto() {
  StrategyList candidates;
  candidates.add(make_rounds);
  candidates.add([] { return make_strategy("alltoall"); });
  std::atomic<int> num_right = 0;
  run_ranks(3, [&](Group& group) {
    Dispatcher dispatcher(group, {.num_experts = 6, .top_k = 1, .width = 4}, "auto", candidates);
    const std::vector<int32_t> ids = {0};
    const std::vector<float> weights = {1.0f};
    const std::vector<float> x(4, static_cast<float>(group.rank()));
    const Plan plan = dispatcher.plan(Routing{.expert_ids = ConstTensorView(ids.data(), {1, 1}),
                                              .weights = ConstTensorView(weights.data(), {1, 1})});
    DispatchArgs args;
    args.x = ConstTensorView(x.data(), {1, 4});
    const DispatchResult rows = dispatcher.dispatch(plan, args);
    const OwnedTensor out = dispatcher.combine(plan, rows.rows.view);
    const bool is_mine = dispatcher.strategy().name() == "rounds";
    if (is_mine && out.view.as<float>()[3] == x[3]) ++num_right;
  });
  std::printf("auto: %d of 3 ranks dispatched with rounds\n", num_right.load());
  return num_right == 3;
}

}  // namespace

int main() {
  plan();
  const bool is_right = dispatch_with_auto();
  return judge() == 0 && is_right ? 0 : 1;
}
