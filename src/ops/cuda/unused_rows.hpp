#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock::ops {

/// Rows that belong to no expert: pad rows, and rows after the last segment up to R.
struct UnusedRows {
  const int64_t* starts;  // [num_experts] or more
  const int64_t* counts;  // [num_experts]
  int num_experts;
  int64_t R;
  std::byte* rows;  // null: nothing to do
  int64_t row_bytes;
};

}  // namespace crossdock::ops
