#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/result.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// A step to be timed, as one rank executes it. All ranks have the same steps in the same order.
struct Step {
  std::string name;
  int64_t bytes = 0;        // see StepResult
  int64_t num_written = 0;  // how many of the bytes are written; 0: unknown
  double flops = 0.0;
  int64_t link_bytes = 0;  // see StepResult
  std::function<void()> run;
  std::function<void()> settle{};  // after every run, not timed
};

struct Repeats {
  int warm_up = 2;
  int timed = 7;
};

/// Called before a step, which starts when all ranks have returned from this call. is_timed: not a
/// warm-up.
using PrepareStep = std::function<void(size_t step, bool is_timed)>;

/// Runs all steps repeatedly, warm-up rounds first. Returns microseconds from the first rank's
/// start to the last rank's end, [step][repetition]. Collective.
std::vector<std::vector<double>> time_steps(Group& group, const std::vector<Step>& steps,
                                            const Repeats& repeats, const PrepareStep& prepare);

/// Runs all steps repeatedly, warm-up rounds first. Before each step, rank 0 times a copy of the
/// step's bytes and a loop with its traffic while the others sleep, so that disturbances affect
/// both measurements; then all ranks pass a barrier. Collective; the result is complete on rank 0
/// only.
std::vector<StepResult> measure(Group& group, const std::vector<Step>& steps,
                                const Repeats& repeats);

}  // namespace crossdock::bench
