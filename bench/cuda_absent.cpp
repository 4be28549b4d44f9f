#include "bench/cuda_bench.hpp"
#include "crossdock/error.hpp"

namespace crossdock::bench {

std::vector<StepResult> run_cuda_move(const Scenario& scenario, const Repeats& /*repeats*/,
                                      bool /*check*/) {
  throw Error(ErrorCode::kUnsupported, "scenario " + scenario.name +
                                           " needs a GPU: this build has no CUDA (configure with "
                                           "CROSSDOCK_WITH_CUDA=ON)");
}

}  // namespace crossdock::bench
