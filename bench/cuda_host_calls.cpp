#include "bench/cuda_host_calls.hpp"

#include <chrono>
#include <cstring>
#include <span>
#include <utility>

#include "bench/cuda_memory.hpp"
#include "bench/sample_summary.hpp"

namespace crossdock::bench {
namespace {

constexpr int kRoundsAtOnce = 16;

// The samples of all ranks; equally many on each.
std::vector<double> gather(Group& group, const std::vector<double>& own) {
  const Agreement all = group.agree({.operation = "bench", .body = std::as_bytes(std::span(own))});
  std::vector<double> samples(own.size() * static_cast<size_t>(group.size()));
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::span<const std::byte> bytes = all.body(rank);
    std::memcpy(samples.data() + static_cast<size_t>(rank) * own.size(), bytes.data(),
                bytes.size());
  }
  return samples;
}

}  // namespace

std::vector<StepResult> time_host_calls(Group& group, const std::vector<Step>& steps,
                                        cudaStream_t stream, const Repeats& repeats) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::vector<double>> samples(steps.size());
  for (int repeat = -repeats.warm_up; repeat < repeats.timed; ++repeat) {
    group.agree({.operation = "bench"});
    for (int round = 0; round < kRoundsAtOnce; ++round) {
      for (size_t i = 0; i < steps.size(); ++i) {
        const auto begin = Clock::now();
        steps[i].run();
        const std::chrono::duration<double, std::micro> taken = Clock::now() - begin;
        if (repeat >= 0) samples[i].push_back(taken.count());
      }
    }
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  std::vector<StepResult> results;
  for (size_t i = 0; i < steps.size(); ++i) {
    results.push_back(summarize(steps[i].name, gather(group, samples[i])));
  }
  return results;
}

}  // namespace crossdock::bench
