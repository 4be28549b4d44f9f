#pragma once

#include <cstdint>
#include <functional>

#include "crossdock/thread_pool.hpp"

namespace crossdock::ops {

/// Runs body(first, last) over blocks of [0, count) on the pool, in any order. `row_bytes` is the
/// number of bytes read and written per row; it determines the size of a block: large enough to be
/// worth handing to a thread, small enough that all threads finish at about the same time.
void for_row_blocks(ThreadPool& pool, int64_t count, int64_t row_bytes,
                    const std::function<void(int64_t first, int64_t last)>& body);

}  // namespace crossdock::ops
