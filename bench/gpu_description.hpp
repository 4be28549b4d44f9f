#pragma once

#include <string>

namespace crossdock::bench {

/// The GPU that scenarios run on.
struct GpuDescription {
  std::string name;    // "NVIDIA H200"; empty without CUDA or without a GPU
  std::string driver;  // "580.159.04"; empty if unknown
};

GpuDescription describe_gpu();

}  // namespace crossdock::bench
