#pragma once

#include <cstddef>
#include <cstdint>

#include "crossdock/dtype.hpp"

namespace crossdock::comm {

/// Whether sum_blocks takes this dtype: fp64, fp32, bf16, fp16 and int64.
bool can_sum(DType dtype);

/// out[i] = blocks[0][i] + blocks[1][i] + ..., in this order. fp32, bf16 and fp16 are summed in
/// fp32 and rounded once; fp64 and int64 in their own dtype.
struct SumBlocksArgs {
  const std::byte* blocks = nullptr;  // [num_blocks, count]
  int num_blocks = 0;                 // at least 1
  int64_t count = 0;
  std::byte* out = nullptr;  // [count]; must not overlap the blocks
};
void sum_blocks(DType dtype, const SumBlocksArgs& args);

}  // namespace crossdock::comm
