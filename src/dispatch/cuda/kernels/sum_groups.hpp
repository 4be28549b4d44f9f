#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "crossdock/dtype.hpp"

namespace crossdock::cuda {

/// A row to add, and the group that it is summed with first.
struct alignas(16) SumTerm {
  int32_t source;  // index into SumGroupsArgs::rows
  int32_t row;
  int32_t group;  // terms of one group are contiguous
  float weight;
};

/// out[n] = round(total), total from +0 by adding the partial sums of n's groups, in order. A
/// partial sum is acc from +0 by fma(weight, row, acc) over the group's terms, in order, rounded to
/// partial_dtype. All sums are in fp32: bit-identical to the CPU.
struct SumGroupsArgs {
  const SumTerm* terms;    // by (n, group, slot)
  const int64_t* offsets;  // [N + 1] into terms
  int64_t N;
  int32_t D;
  DType row_dtype;                   // fp32, bf16 or fp16
  DType partial_dtype;               // row_dtype or fp32
  DType out_dtype;                   // row_dtype or partial_dtype
  bool is_weighted;                  // false: all weights are 1
  const std::byte* rows[kMaxPeers];  // [any, D] of every source, of row_dtype
  int32_t partial_source;            // its rows are of partial_dtype; -1: none
  std::byte* out;                    // [N, D]
  PeerSignals signals;
  Operation operation;  // for messages
};

/// Collective among the ranks of `signals`; when it ends, all of them have read their rows. With
/// P = 0 it waits for no rank. REQUIRES: all rows are written. If the channel has ended, no rows
/// are read and out is zero. `sms`: SM limit; 0: none.
void load_sum_groups();  // before the first launch
void launch_sum_groups(const SumGroupsArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
