#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/result.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// What is timed, as one rank does it. All ranks have the same steps in the same order.
struct Step {
  std::string name;
  int64_t bytes = 0;        // see StepResult
  int64_t num_written = 0;  // so many of them are written; 0: not known
  double flops = 0.0;
  std::function<void()> run;
  std::function<void()> settle{};  // after every run, not timed
};

struct Repeats {
  int warm_up = 2;
  int timed = 7;
};

/// Runs the steps in turn, warm-up rounds first. Before each step all ranks meet, after rank 0 has
/// timed a copy of the step's bytes, and its traffic, while the others sleep: what disturbs one
/// disturbs the other. Collective; the result is complete on rank 0 only.
std::vector<StepResult> measure(Group& group, const std::vector<Step>& steps,
                                const Repeats& repeats);

}  // namespace crossdock::bench
