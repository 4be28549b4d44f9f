#include "bench/agree_bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>

#include "bench/median.hpp"
#include "bench/sample_summary.hpp"

namespace crossdock::bench {
namespace {

constexpr int kCallsPerRepetition = 2000;

// Each call ends when all ranks have arrived, so the next one starts on all of them together.
double median_call_us(Group& group) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  times.reserve(kCallsPerRepetition);
  auto begin = Clock::now();
  for (int call = 0; call < kCallsPerRepetition; ++call) {
    group.agree({.operation = "bench"});
    const auto end = Clock::now();
    times.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    begin = end;
  }
  return median(std::move(times));
}

// The largest value of any rank.
double slowest(Group& group, double own) {
  const Agreement all =
      group.agree({.operation = "bench", .body = std::as_bytes(std::span(&own, 1))});
  for (int rank = 0; rank < group.size(); ++rank) {
    double other = 0.0;
    std::memcpy(&other, all.body(rank).data(), sizeof(other));
    own = std::max(own, other);
  }
  return own;
}

}  // namespace

std::vector<StepResult> run_agree(Group& group, const Repeats& repeats) {
  std::vector<double> medians;
  for (int round = -repeats.warm_up; round < repeats.timed; ++round) {
    const double us = slowest(group, median_call_us(group));
    if (round >= 0) medians.push_back(us);
  }
  return {summarize("agree", std::move(medians))};
}

}  // namespace crossdock::bench
