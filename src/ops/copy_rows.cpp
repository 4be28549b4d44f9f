#include "ops/copy_rows.hpp"

#include <algorithm>
#include <cstring>

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
