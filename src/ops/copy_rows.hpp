#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "core/stream_copy.hpp"
#include "crossdock/tensor.hpp"
#include "crossdock/thread_pool.hpp"

namespace crossdock::ops {

// Rows are copied as bits, so one function serves every dtype. Inputs may be empty, with null
// pointers.

/// rows[i] = x[index[i]]
struct GatherRowsArgs {
  const std::byte* x = nullptr;    // [N, row_bytes]
  const int64_t* index = nullptr;  // [num_rows] in [0, N)
  std::byte* rows = nullptr;       // [num_rows, row_bytes]
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  Stores stores = Stores::kCached;
};
void gather_rows(const GatherRowsArgs& args);

/// rows[index[i]] = x[i]: the inverse
struct ScatterRowsArgs {
  const std::byte* x = nullptr;    // [num_rows, row_bytes]
  const int64_t* index = nullptr;  // [num_rows] in [0, N), no value twice
  std::byte* rows = nullptr;       // [N, row_bytes]
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
};
void scatter_rows(const ScatterRowsArgs& args);

/// Copies each token to all its places: one read, up to K stores.
struct FanOutArgs {
  const std::byte* x = nullptr;              // [T, row_bytes]
  std::byte* const* destinations = nullptr;  // [T, K] where a copy goes; null: nowhere
  int64_t T = 0;
  int64_t K = 0;
  int64_t row_bytes = 0;
};
void fan_out(const FanOutArgs& args, ThreadPool& pool);

/// Copies rows [from, from + count) of one buffer to rows [to, to + count) of another.
struct BlockCopy {
  int64_t from = 0;
  int64_t to = 0;
  int64_t count = 0;
};
struct CopyBlocksArgs {
  const std::byte* from = nullptr;  // [.., row_bytes]
  std::byte* to = nullptr;          // [.., row_bytes]
  std::span<const BlockCopy> blocks;
  int64_t row_bytes = 0;
};
void copy_blocks(const CopyBlocksArgs& args);

/// Runs body(first, last) over blocks of [0, count) on the pool, in any order. `row_bytes` is the
/// number of bytes read and written per row; it determines the size of a block: large enough to be
/// worth handing to a thread, small enough that all threads finish at about the same time.
void for_row_blocks(ThreadPool& pool, int64_t count, int64_t row_bytes,
                    const std::function<void(int64_t first, int64_t last)>& body);

}  // namespace crossdock::ops
