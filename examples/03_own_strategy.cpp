// A strategy of your own, judged by the suite that judges those of Crossdock.
//
// "rounds" sends at most 8 rows to each rank at a time, so that staging memory does not grow with
// tokens. What it does not do itself it leaves to another strategy.
#include <algorithm>
#include <atomic>
#include <crossdock/crossdock.hpp>
#include <crossdock/extend/strategy.hpp>
#include <crossdock/testing/conformance.hpp>
#include <cstdio>
#include <cstring>

using namespace crossdock;

namespace {

class Rounds : public Strategy {
 public:
  std::string_view name() const override { return "rounds"; }

  // What the other strategy keeps in a plan.
  std::shared_ptr<const void> prepare(const Exchange& exchange) override {
    return other_->prepare(exchange);
  }

  // Every row goes to rank `owner`, into the place that the plan gives it there.
  void scatter(const Exchange& exchange, std::span<const RowPart> parts) override {
    // All ranks know all counts, so they make the same number of rounds.
    const int64_t most = most_rows_of_a_pair(exchange.plan.data());
    for (const RowPart& part : parts) {
      for (int64_t begin = 0; begin < most; begin += kRows) run_round(exchange, part, begin);
    }
  }

  void gather_sum(const Exchange& exchange, const GatherSumArgs& args) override {
    other_->gather_sum(exchange, args);
  }
  void gather_partial_sums(const Exchange& exchange, const GatherSumArgs& args) override {
    other_->gather_partial_sums(exchange, args);
  }

 private:
  static constexpr int64_t kRows = 8;

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

  // The rows of a round, for each rank [first, end) of `offsets`, as offsets of their own in bytes.
  static std::vector<int64_t> round_offsets(std::span<const int64_t> offsets, int64_t begin,
                                            int64_t row_bytes) {
    std::vector<int64_t> result = {0};
    for (size_t r = 0; r + 1 < offsets.size(); ++r) {
      const int64_t left = std::clamp<int64_t>(offsets[r + 1] - offsets[r] - begin, 0, kRows);
      result.push_back(result.back() + left * row_bytes);
    }
    return result;
  }

  static void run_round(const Exchange& exchange, const RowPart& part, int64_t begin) {
    const PlanData& plan = exchange.plan.data();
    const int64_t bytes = part.row_bytes;
    const std::vector<int64_t> send_offsets = round_offsets(plan.send_offsets, begin, bytes);
    const std::vector<int64_t> recv_offsets = round_offsets(plan.recv_offsets, begin, bytes);
    const Buffer send = exchange.group.pool().take(send_offsets.back());
    const Buffer recv = exchange.group.pool().take(recv_offsets.back());
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
    exchange.group.all_to_all_v({send.data(), send.num_bytes(), send.owner()}, send_offsets,
                                {recv.data(), recv.num_bytes(), recv.owner()}, recv_offsets,
                                exchange.group.wait_context(exchange.operation, exchange.sequence));
    for (const RowBlock& block : plan.recv_blocks) {
      const auto r = static_cast<size_t>(block.source);
      const int64_t first = plan.recv_offsets[r] + begin;  // arrival that the round starts with
      for (int64_t i = 0; i < size(recv_offsets, r); ++i) {
        const int64_t within = first + i - block.arrival;
        if (within < 0 || within >= block.count) continue;
        std::memcpy(part.rows + (block.row + within) * bytes,
                    recv.data() + recv_offsets[r] + i * bytes, static_cast<size_t>(bytes));
      }
    }
  }

  std::unique_ptr<Strategy> other_ = make_strategy("alltoall");
};

}  // namespace

int main() {
  std::vector<conformance::Check> checks = conformance::list_checks();
  std::erase_if(checks, [](const conformance::Check& check) { return !check.is_quick; });
  std::atomic<size_t> num_failures = 0;  // of all ranks
  run_ranks(3, [&](Group& group) {
    const conformance::Report report = conformance::run_checks(
        group, [] { return std::make_unique<Rounds>(); }, checks);
    for (const conformance::Failure& failure : report.failures) {
      std::printf("%s: %s\n", failure.check.c_str(), failure.message.c_str());
    }
    num_failures += report.failures.size();
  });
  std::printf("rounds: %zu checks, %zu failures\n", checks.size(), num_failures.load());
  return num_failures == 0 ? 0 : 1;
}
