#include "bench/measure.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <span>

#include "bench/copy_ceiling.hpp"
#include "bench/median.hpp"
#include "bench/sample_summary.hpp"

namespace crossdock::bench {
namespace {

// On the clock that all processes of the machine share.
struct Interval {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void meet(Group& group) {
  // A rank that waited long is asleep and wakes late; after a second barrier all are awake.
  group.agree({.operation = "bench"});
  group.agree({.operation = "bench"});
}

// Clocks of different machines cannot be compared: take the longest duration of any rank.
double duration_us(const std::vector<Interval>& of_ranks, bool is_one_machine) {
  int64_t first = of_ranks[0].begin_ns;
  int64_t last = of_ranks[0].end_ns;
  int64_t longest = 0;
  for (const Interval& interval : of_ranks) {
    first = std::min(first, interval.begin_ns);
    last = std::max(last, interval.end_ns);
    longest = std::max(longest, interval.end_ns - interval.begin_ns);
  }
  return static_cast<double>(is_one_machine ? last - first : longest) * 1e-3;
}

double traffic_of(const Step& step, CopyCeiling& ceiling) {
  if (step.num_written == 0) return 0.0;
  return ceiling.traffic_us(step.bytes - step.num_written, step.num_written);
}

// Combines the intervals of all ranks: [step][repetition].
std::vector<std::vector<double>> durations_us(Group& group, const std::vector<Interval>& own,
                                              size_t num_steps) {
  const Agreement all = group.agree({.operation = "bench", .body = std::as_bytes(std::span(own))});
  const bool is_one_machine = group.topology().num_nodes == 1;
  std::vector<std::vector<double>> durations(num_steps);
  for (size_t i = 0; i < own.size(); ++i) {
    std::vector<Interval> of_ranks(static_cast<size_t>(group.size()));
    for (int rank = 0; rank < group.size(); ++rank) {
      std::memcpy(&of_ranks[static_cast<size_t>(rank)],
                  all.body(rank).data() + i * sizeof(Interval), sizeof(Interval));
    }
    durations[i % num_steps].push_back(duration_us(of_ranks, is_one_machine));
  }
  return durations;
}

}  // namespace

std::vector<std::vector<double>> time_steps(Group& group, const std::vector<Step>& steps,
                                            const Repeats& repeats, const PrepareStep& prepare) {
  std::vector<Interval> intervals;  // [repetition, step]
  for (int round = -repeats.warm_up; round < repeats.timed; ++round) {
    for (size_t i = 0; i < steps.size(); ++i) {
      prepare(i, /*is_timed=*/round >= 0);
      meet(group);
      Interval interval{.begin_ns = now_ns()};
      steps[i].run();
      interval.end_ns = now_ns();
      if (steps[i].settle) steps[i].settle();
      if (round >= 0) intervals.push_back(interval);
    }
  }
  return durations_us(group, intervals, steps.size());
}

std::vector<StepResult> measure(Group& group, const std::vector<Step>& steps,
                                const Repeats& repeats) {
  std::unique_ptr<CopyCeiling> ceiling;
  if (group.rank() == 0) {
    const auto largest = std::ranges::max_element(steps, {}, &Step::bytes);
    ceiling = std::make_unique<CopyCeiling>(largest->bytes);
  }
  std::vector<std::vector<double>> copies(steps.size());
  std::vector<std::vector<double>> traffics(steps.size());
  const auto durations = time_steps(group, steps, repeats, [&](size_t i, bool is_timed) {
    const double copy_us = ceiling ? ceiling->copy_us(steps[i].bytes) : 0.0;
    const double traffic_us = ceiling ? traffic_of(steps[i], *ceiling) : 0.0;
    if (!is_timed) return;
    copies[i].push_back(copy_us);
    traffics[i].push_back(traffic_us);
  });
  std::vector<StepResult> results;
  for (size_t i = 0; i < steps.size(); ++i) {
    StepResult result = summarize(steps[i].name, durations[i]);
    result.bytes = steps[i].bytes;
    result.copy_us = median(copies[i]);
    result.traffic_us = median(traffics[i]);
    result.gflops = steps[i].flops / result.median_us * 1e-3;
    results.push_back(result);
  }
  return results;
}

}  // namespace crossdock::bench
