#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <span>

#include "core/cuda/device.hpp"

namespace crossdock::cuda {

struct LaunchShape {
  unsigned blocks;
  unsigned threads;
  size_t shared_bytes = 0;  // dynamic shared memory of a block
};

/// Whether a kernel compiled for these architectures (900: sm_90) waits for the previous one on a
/// device of this major compute capability: code for older architectures, translated by the driver,
/// has no instruction for it.
constexpr bool waits_in_kernels(std::span<const int> architectures, int device_major) {
  return std::ranges::any_of(architectures, [&](int architecture) {
    return architecture >= 900 && architecture / 100 <= device_major;
  });
}

#if defined(__CUDACC__)

/// Launches a kernel that may be scheduled while the previous kernel in the stream is ending. The
/// kernel must call wait_for_previous_kernel() before it reads or writes anything; before that it
/// may only prefetch, or read data that earlier kernels do not write.
template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                  const Args&... args) {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = waits_in_kernels(kArchitectures, compute_capability(current_device())) ? 1 : 0;
  CROSSDOCK_CUDA(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), unsigned blocks, unsigned threads, cudaStream_t stream,
                  const Args&... args) {
  launch_early(kernel, LaunchShape{blocks, threads}, stream, args...);
}

/// Waits until the previous kernel in the stream has ended; what it wrote is then visible.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Allows the next kernel in the stream to be scheduled once all blocks of this kernel have called
/// it. The next kernel must not wait for a kernel that may need the resources it occupies.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif  // __CUDACC__

inline std::mutex& loading_mutex() {
  static std::mutex& one = *new std::mutex;
  return one;
}

/// Loads kernels onto the current device. Otherwise a kernel is loaded at its first launch, for
/// which the driver may wait for the device; if kernels of other ranks wait for that launch, they
/// deadlock. Only one thread loads at a time, so the kernels are loaded once any rank returns.
template <typename... Kernels>
void load_kernels(Kernels... kernels) {
  const std::lock_guard lock(loading_mutex());
  cudaFuncAttributes attributes{};
  (CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernels))), ...);
}

}  // namespace crossdock::cuda
