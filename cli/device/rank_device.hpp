#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cli {

/// Throws Error(kUnsupported) if there is no GPU. Call it before anything else that uses GPUs: it
/// asks the driver for a queue per rank, as several ranks may share a GPU.
void prepare_gpus();

/// Why there is no GPU, and what brings one.
std::string missing_gpu();

/// A GPU of this machine.
struct GpuInfo {
  std::string name;
  int64_t memory_bytes = 0;
  std::vector<int>
      unreachable;  // GPUs whose memory it cannot access; rows to them go through the host
};
/// All GPUs that this process sees; empty without CUDA.
std::vector<GpuInfo> list_gpus();

/// Which ranks use which GPU: "8 GPUs here; rank r of a node uses GPU r mod 8".
std::string gpu_rule();

/// Where a rank keeps its tensors: in host memory, or on a GPU with its own stream, in which the
/// rank's work is queued.
class RankDevice {
 public:
  virtual ~RankDevice() = default;

  virtual Device device() const = 0;
  virtual Stream stream() const = 0;
  bool is_gpu() const { return !device().is_cpu(); }

  /// Memory with unspecified contents. Release it before this object.
  virtual OwnedTensor allocate(DType dtype, const Shape& shape) = 0;
  /// A copy on this device. Waits.
  virtual OwnedTensor to_device(const ConstTensorView& host) = 0;
  /// Copies a tensor of this device to host memory of the same size. Waits.
  virtual void read(const ConstTensorView& tensor, const TensorView& host) = 0;
  /// Waits until all work in the stream has finished.
  virtual void wait() = 0;

  /// A copy in host memory of a tensor on this device or on the host. Waits.
  OwnedTensor to_host(const ConstTensorView& tensor);
};

std::unique_ptr<RankDevice> make_host_device();
/// Uses the GPU of the group's rank (see cuda_device_of). REQUIRES: prepare_gpus was called.
std::unique_ptr<RankDevice> make_gpu_device(Group& group);

/// "cpu" or "cuda".
inline std::unique_ptr<RankDevice> make_rank_device(const std::string& name, Group& group) {
  return name == "cuda" ? make_gpu_device(group) : make_host_device();
}

}  // namespace crossdock::cli
