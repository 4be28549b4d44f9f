#include "bench/cuda_bench.hpp"
#include "bench/gpu_description.hpp"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

[[noreturn]] void refuse(const Scenario& scenario) {
  throw Error(ErrorCode::kUnsupported, "scenario " + scenario.name +
                                           " needs a GPU: this build has no CUDA (configure with "
                                           "CROSSDOCK_WITH_CUDA=ON)");
}

}  // namespace

CudaResult run_cuda_move(const Scenario& scenario, const Repeats& /*repeats*/, bool /*check*/) {
  refuse(scenario);
}

CudaResult run_cuda_move(const Scenario& scenario, Group& /*group*/, const Repeats& /*repeats*/,
                         bool /*check*/) {
  refuse(scenario);
}

std::vector<StepResult> run_cuda_layer(const Scenario& scenario, const Repeats& /*repeats*/,
                                       bool /*check*/) {
  refuse(scenario);
}

std::vector<StepResult> run_cuda_overlap(const Scenario& scenario, const Repeats& /*repeats*/,
                                         bool /*check*/) {
  refuse(scenario);
}

std::vector<StepResult> run_cuda_products(const Scenario& scenario, const Repeats& /*repeats*/,
                                          bool /*check*/) {
  refuse(scenario);
}

std::vector<StepResult> run_cuda_quantise(const Scenario& scenario, const Repeats& /*repeats*/,
                                          bool /*check*/) {
  refuse(scenario);
}

GpuDescription describe_gpu() {
  return {};
}

}  // namespace crossdock::bench
