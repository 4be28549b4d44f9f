#include "cli/device/rank_device.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {

std::vector<GpuInfo> list_gpus() {
  return {};
}

std::unique_ptr<RankDevice> make_gpu_device(Group& /*group*/) {
  throw Error(ErrorCode::kUnsupported, missing_gpu());
}

}  // namespace crossdock::cli
