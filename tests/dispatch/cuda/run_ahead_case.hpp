// Shared by the tests of ranks that run ahead.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "dispatch/cuda/step.hpp"

namespace crossdock {

using CudaRunAhead = CudaTest;

inline constexpr comm::GpuPretences kThreadsRunAhead{.threads_run_ahead = true};

/// As run_on_gpu, with ranks that run ahead although they are threads.
inline void run_ahead_on_gpu(const DispatchCase& the_case, GpuSetting setting,
                             const std::function<void(GpuRank&, const StepBytes& wanted)>& body) {
  setting.pretences = kThreadsRunAhead;
  run_on_gpu(the_case, setting, body);
}

inline constexpr int64_t kWidth = 24;

inline DispatchCase case_of(std::vector<int64_t> tokens, unsigned seed) {
  const DispatchConfig config{.num_experts = 11, .top_k = 3, .width = kWidth, .max_rows = 900};
  return random_case(config, tokens, seed);
}

/// The error that a rank gets for a call: in the call, or later.
inline std::string late_message(GpuRank& rank, const std::function<void()>& call) {
  return message_of([&] {
    call();
    rank.stream.synchronize();
    rank.dispatcher.check();
    throw Error(ErrorCode::kInternal, "there was no error");
  });
}

inline void expect_steps_work(GpuRank& rank, const StepBytes& wanted) {
  for (int step = 0; step < 2; ++step) {
    const QueuedStep queued(rank.dispatcher, rank.tensors);
    expect_same(queued.wait(rank.stream), wanted);
  }
  rank.dispatcher.check();
}

}  // namespace crossdock
