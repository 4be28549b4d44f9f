#pragma once

#include <string>

namespace crossdock::bench {

/// The GPUs that scenarios run on.
struct GpuDescription {
  int count = 0;
  std::string name{};    // "NVIDIA H200"; different ones are listed. Empty without CUDA or a GPU
  std::string driver{};  // "580.159.04"; empty if unknown
};

GpuDescription describe_gpu();

}  // namespace crossdock::bench
