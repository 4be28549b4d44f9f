#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/stream.hpp"
#include "crossdock/dtype.hpp"
#include "ops/copy_rows.hpp"

namespace crossdock::ops {
namespace {

constexpr int kThreads = 256;

// A block takes rows in turn; a thread converts single values.
template <typename Scale>
__global__ void fp8_to_bf16_kernel(const F8E4M3* rows, const Scale* scales, BF16* out, int64_t R,
                                   int64_t D, int64_t group) {
  const int64_t num_scales = (D + group - 1) / group;
  for (int64_t r = blockIdx.x; r < R; r += gridDim.x) {
    for (int64_t d = threadIdx.x; d < D; d += kThreads) {
      const float scale = to_float(scales[r * num_scales + d / group]);
      out[r * D + d] = to_bf16(__fmul_rn(to_float(rows[r * D + d]), scale));
    }
  }
}

template <typename Scale>
void launch(const Fp8ToBf16Args& a) {
  const int64_t R = a.rows.shape[0];
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(R, 1, 65536));
  fp8_to_bf16_kernel<<<blocks, kThreads, 0, cuda::handle_of(a.stream)>>>(
      static_cast<const F8E4M3*>(a.rows.data), static_cast<const Scale*>(a.scales.data),
      static_cast<BF16*>(a.out.data), R, a.rows.shape[1], fp8_group_size(a.scales.dtype));
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace

void load_fp8_rows() {
  cuda::load_kernels(fp8_to_bf16_kernel<float>, fp8_to_bf16_kernel<E8M0>);
}

void fp8_to_bf16_on_device(const Fp8ToBf16Args& args) {
  const cuda::DeviceGuard guard(args.rows.device.index);
  if (args.scales.dtype == DType::kF32) {
    launch<float>(args);
  } else {
    launch<E8M0>(args);
  }
}

}  // namespace crossdock::ops
