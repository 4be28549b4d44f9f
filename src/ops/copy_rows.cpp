#include "ops/copy_rows.hpp"

#include <algorithm>
#include <cstring>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/tensor.hpp"
#include "ops/convert.hpp"

namespace crossdock::ops {
namespace {

// A copy of a size known at compile time is one load and one store. Used for rows of a single
// number (weights, token numbers).
template <int kRowBytes>
void gather_small(const GatherRowsArgs& a) {
  for (int64_t i = 0; i < a.num_rows; ++i) {
    std::memcpy(a.rows + i * kRowBytes, a.x + a.index[i] * kRowBytes, kRowBytes);
  }
}

template <int kRowBytes>
void scatter_small(const ScatterRowsArgs& a) {
  for (int64_t i = 0; i < a.num_rows; ++i) {
    std::memcpy(a.rows + a.index[i] * kRowBytes, a.x + i * kRowBytes, kRowBytes);
  }
}

}  // namespace

void gather_rows(const GatherRowsArgs& a) {
  if (a.row_bytes == 4) return gather_small<4>(a);
  if (a.row_bytes == 8) return gather_small<8>(a);
  for (int64_t i = 0; i < a.num_rows; ++i) {
    copy_bytes(a.rows + i * a.row_bytes, a.x + a.index[i] * a.row_bytes, a.row_bytes, a.stores);
  }
  finish_stores();
}

void scatter_rows(const ScatterRowsArgs& a) {
  if (a.row_bytes == 4) return scatter_small<4>(a);
  if (a.row_bytes == 8) return scatter_small<8>(a);
  for (int64_t i = 0; i < a.num_rows; ++i) {
    copy_bytes(a.rows + a.index[i] * a.row_bytes, a.x + i * a.row_bytes, a.row_bytes,
               Stores::kCached);
  }
}

void fan_out(const FanOutArgs& a, ThreadPool& pool) {
  const Stores stores = stores_for(a.T * a.K * a.row_bytes);
  for_row_blocks(pool, a.T, (1 + a.K) * a.row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const std::byte* token = a.x + t * a.row_bytes;
      for (int64_t k = 0; k < a.K; ++k) {
        std::byte* destination = a.destinations[t * a.K + k];
        if (destination != nullptr) copy_bytes(destination, token, a.row_bytes, stores);
      }
    }
    finish_stores();
  });
}

void copy_blocks(const CopyBlocksArgs& a) {
  int64_t num_rows = 0;
  for (const BlockCopy& block : a.blocks) num_rows += block.count;
  const Stores stores = stores_for(num_rows * a.row_bytes);
  for (const BlockCopy& block : a.blocks) {
    copy_bytes(a.to + block.to * a.row_bytes, a.from + block.from * a.row_bytes,
               block.count * a.row_bytes, stores);
  }
  finish_stores();
}

namespace {

// About 100 us of a core's memory traffic; handing a block to a thread takes a few us.
constexpr int64_t kBlockBytes = int64_t{1} << 20;

}  // namespace

void for_row_blocks(ThreadPool& pool, int64_t count, int64_t row_bytes,
                    const std::function<void(int64_t first, int64_t last)>& body) {
  if (count <= 0) return;
  const int64_t rows = std::max<int64_t>(1, kBlockBytes / std::max<int64_t>(1, row_bytes));
  const auto run_block = [&](int64_t block) {
    body(block * rows, std::min(count, (block + 1) * rows));
  };
  // Runs before the tasks of experts that compute during an exchange: peers wait for these rows.
  pool.parallel_for((count + rows - 1) / rows, run_block, Turn::kNext);
}

}  // namespace crossdock::ops

namespace crossdock {
namespace {

template <typename Scale>
CROSSDOCK_INLINE void convert_as(const Fp8ToBf16Args& a, int64_t group) {
  const int64_t R = a.rows.shape[0];
  const int64_t D = a.rows.shape[1];
  const auto* rows = static_cast<const F8E4M3*>(a.rows.data);
  const auto* scales = static_cast<const Scale*>(a.scales.data);
  auto* out = static_cast<BF16*>(a.out.data);
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t first = 0; first < D; first += group) {
      const float scale = to_float(*scales++);
      const int64_t last = std::min(first + group, D);
      for (int64_t d = first; d < last; ++d) {
        out[r * D + d] = to_bf16(to_float(rows[r * D + d]) * scale);
      }
    }
  }
}

CROSSDOCK_SIMD void convert_f32(const Fp8ToBf16Args& a) {
  convert_as<float>(a, 128);
}
CROSSDOCK_SIMD void convert_e8m0(const Fp8ToBf16Args& a) {
  convert_as<E8M0>(a, 32);
}

}  // namespace

#if !CROSSDOCK_HAS_CUDA
void ops::fp8_to_bf16_on_device(const Fp8ToBf16Args& /*args*/) {
  throw Error(ErrorCode::kUnsupported, "this build has no CUDA, and the rows are on a GPU");
}
#endif

int64_t fp8_group_size(DType scale_dtype) {
  CROSSDOCK_CHECK(scale_dtype == DType::kF32 || scale_dtype == DType::kE8M0,
                  "scales of fp8 must be fp32 (one per 128 values) or e8m0 (one per 32), got ",
                  name_of(scale_dtype));
  return scale_dtype == DType::kF32 ? 128 : 32;
}

void fp8_to_bf16(const Fp8ToBf16Args& a) {
  CROSSDOCK_CHECK(a.rows.dtype == DType::kF8E4M3 && a.rows.shape.rank() == 2,
                  "rows must be [R, D] fp8_e4m3, got ", a.rows.shape.to_string(), " ",
                  name_of(a.rows.dtype));
  const int64_t group = fp8_group_size(a.scales.dtype);
  const Shape wanted{a.rows.shape[0], (a.rows.shape[1] + group - 1) / group};
  CROSSDOCK_CHECK(a.scales.shape == wanted, "scales must be ", wanted.to_string(), " for rows ",
                  a.rows.shape.to_string(), ", got ", a.scales.shape.to_string());
  CROSSDOCK_CHECK(a.out.dtype == DType::kBF16 && a.out.shape == a.rows.shape, "out must be ",
                  a.rows.shape.to_string(), " bf16, got ", a.out.shape.to_string(), " ",
                  name_of(a.out.dtype));
  CROSSDOCK_CHECK(a.rows.device == a.scales.device && a.rows.device == a.out.device,
                  "rows, scales and out must be on the same device");
  check_no_overlap({{"out", a.out}}, {{"rows", a.rows}, {"scales", a.scales}});
  if (!a.rows.device.is_cpu()) return ops::fp8_to_bf16_on_device(a);
  return a.scales.dtype == DType::kF32 ? convert_f32(a) : convert_e8m0(a);
}

}  // namespace crossdock
