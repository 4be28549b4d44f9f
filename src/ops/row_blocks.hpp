#pragma once

#include <cstdint>
#include <functional>

#include "crossdock/thread_pool.hpp"

namespace crossdock::ops {

/// Runs body(first, last) over blocks of [0, count) on the pool, in any order. `row_bytes` is what
/// one row reads and writes: a block is large enough to be worth handing over, and small enough
/// that the threads end together.
void for_row_blocks(ThreadPool& pool, int64_t count, int64_t row_bytes,
                    const std::function<void(int64_t first, int64_t last)>& body);

}  // namespace crossdock::ops
