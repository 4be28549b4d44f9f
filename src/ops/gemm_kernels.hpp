#pragma once

#include <string_view>
#include <vector>

#include "ops/gemm.hpp"

// The kernels, one source file per instruction set; gemm.cpp chooses among them at run time. All
// give the same bits.

namespace crossdock::ops {

/// Packed operands of one tile.
template <typename T>
struct alignas(64) GemmScratch {
  T a[kGemmTileRows * kGemmBlockK];
  T b[kGemmTileColumns * kGemmBlockK];
  T panel[kGemmColumnMultiple * kGemmBlockK];  // of b, widened, not yet transposed
};

void gemm_avx512(const GemmArgs<float>& args, GemmScratch<float>& scratch);
void gemm_avx512(const GemmArgs<double>& args, GemmScratch<double>& scratch);
void gemm_avx2(const GemmArgs<float>& args, GemmScratch<float>& scratch);
void gemm_avx2(const GemmArgs<double>& args, GemmScratch<double>& scratch);
void gemm_portable(const GemmArgs<float>& args, GemmScratch<float>& scratch);
void gemm_portable(const GemmArgs<double>& args, GemmScratch<double>& scratch);

struct GemmKernel {
  std::string_view name;
  void (*run_f32)(const GemmArgs<float>& args, GemmScratch<float>& scratch) = nullptr;
  void (*run_f64)(const GemmArgs<double>& args, GemmScratch<double>& scratch) = nullptr;
};

/// The kernels this machine can run, fastest first; never empty.
const std::vector<GemmKernel>& gemm_kernels();

}  // namespace crossdock::ops
