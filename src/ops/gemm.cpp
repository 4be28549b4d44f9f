#include "ops/gemm.hpp"

#include <memory>

namespace crossdock::ops {
namespace {

std::vector<GemmKernel> find_kernels() {
  std::vector<GemmKernel> kernels;
#if CROSSDOCK_HAS_X86_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) kernels.push_back({"avx512", gemm_avx512, gemm_avx512});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kernels.push_back({"avx2", gemm_avx2, gemm_avx2});
  }
#endif
  kernels.push_back({"portable", gemm_portable, gemm_portable});
  return kernels;
}

// About half a megabyte (fp32) for every thread that multiplies, kept until the thread ends.
template <typename T>
GemmScratch<T>& thread_scratch() {
  static thread_local const auto kScratch = std::make_unique_for_overwrite<GemmScratch<T>>();
  return *kScratch;
}

}  // namespace

const std::vector<GemmKernel>& gemm_kernels() {
  static const std::vector<GemmKernel> kKernels = find_kernels();
  return kKernels;
}

void gemm(const GemmArgs<float>& args) {
  gemm_kernels().front().run_f32(args, thread_scratch<float>());
}

void gemm(const GemmArgs<double>& args) {
  gemm_kernels().front().run_f64(args, thread_scratch<double>());
}

}  // namespace crossdock::ops
