#include "bench/cuda_steps.hpp"

#include <algorithm>

#include "bench/sample_summary.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

// 780 TFLOP/s on the 132 SMs of an H200.
constexpr double kFlopsPerUsAndSm = 780e6 / 132;

GpuRates measure_rates(cudaStream_t stream) {
  int num_sms = 0;
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, gpu_of(stream)),
             "cudaDeviceGetAttribute");
  return {.bytes_per_us = measure_copy_bandwidth(stream),
          .flops_per_us = kFlopsPerUsAndSm * num_sms};
}

}  // namespace

void require_gpu(const Scenario& scenario) {
  if (cuda_device_count() > 0) return;
  throw Error(ErrorCode::kUnsupported,
              "scenario " + scenario.name + " needs a GPU: " + cuda_missing_reason());
}

double GpuRates::floor_us(double bytes, double flops) const {
  return std::max(bytes / bytes_per_us, flops / flops_per_us);
}

CudaStepTimer::CudaStepTimer(const Repeats& repeats)
    : repeats_(repeats), streams_(1), rates_(measure_rates(stream())), flush_({stream()}) {}

StepResult CudaStepTimer::time(Group& group, const Step& step, int runs) {
  const auto settle = [&] {
    check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize, " + step.name);
    if (step.settle) step.settle();
  };
  step.run();  // allocates memory and fails early, before the capture
  settle();
  const cudaGraphExec_t graph = streams_.capture(group, step.run);
  std::vector<double> times = time_replays(streams_, graph, flush_, repeats_);
  for (double& time : times) time /= runs;
  check_cuda(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
  settle();
  const auto bytes = static_cast<double>(step.bytes);
  StepResult result = summarize(step.name, times);
  result.bytes = step.bytes;
  result.copy_us = bytes / rates_.bytes_per_us;
  result.gflops = step.flops / result.median_us * 1e-3;
  result.flops = step.flops;
  result.floor_us = rates_.floor_us(bytes, step.flops);
  return result;
}

}  // namespace crossdock::bench
