#include "cli/device/rank_device.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {

std::vector<GpuInfo> list_gpus() {
  return {};
}

std::unique_ptr<RankDevice> make_gpu_device(Group& /*group*/) {
  throw Error(ErrorCode::kUnsupported, "--device cuda needs a GPU: " + cuda_missing_reason());
}

}  // namespace crossdock::cli
