// For a shared library, which hides its kernels from other programs.
#include "bench/cuda_bench.hpp"
#include "bench/kernels/activation_step.hpp"
#include "crossdock/error.hpp"

namespace crossdock::bench {

std::function<void()> make_activation_backward(const Scenario& /*scenario*/,
                                               const Segments& /*segments*/,
                                               cudaStream_t /*stream*/) {
  return nullptr;
}

std::vector<StepResult> run_cuda_products(const Scenario& scenario, const Repeats& /*repeats*/,
                                          bool /*check*/) {
  throw Error(ErrorCode::kUnsupported,
              "scenario " + scenario.name +
                  " calls kernels that a shared library hides (configure with "
                  "BUILD_SHARED_LIBS=OFF)");
}

}  // namespace crossdock::bench
