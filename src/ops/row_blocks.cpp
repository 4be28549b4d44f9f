#include "ops/row_blocks.hpp"

#include <algorithm>

namespace crossdock::ops {
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
