#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "crossdock/dtype.hpp"
#include "crossdock/plan.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// out[t] = round(acc), acc from +0 by fma(weight[t, k], rows[row of (t, k)], acc) in fp32, k
/// ascending: bit-identical to the CPU.
struct GatherSumKernelArgs {
  const RouteTarget* targets;  // [T, K]
  const float* weights;        // [T, K], or null: all 1
  int64_t T;
  int32_t K;
  int32_t D;
  DType dtype;                         // of the rows: fp32, bf16 or fp16
  DType out_dtype;                     // dtype; or bf16 or fp16 with fp32 rows
  PeerPointers<const std::byte> rows;  // [R, D] of every rank; null if it has no target
  std::byte* out;                      // [T, D]
  /// Not kNone: acc is rounded to this, as the token's only partial sum, and added to +0.
  PartialSums whole_sum;
  PeerSignals signals;
  Operation operation;  // for messages
  int num_sharing;      // ranks whose kernels of this call share the GPU
  bool awaits_peers;    // at its start; the blocks of all ranks must fit on their GPU together
};

/// Collective; when it ends, all ranks have read their rows. REQUIRES: all ranks' rows are written
/// or, with awaits_peers, are written once their streams reach the kernel. If a rank has not
/// arrived, no rows are read and out is zero. `sms`: SM limit; 0: none.
void load_gather_sum();  // before the first launch
/// A barrier of all ranks, to launch before a gather_sum that does not wait for its peers itself.
/// Meanwhile prefetches some of this rank's rows (own_bytes in all) into the L2 cache, since memory
/// is idle: saves 1 us for 128 tokens of 14 KiB on 8 ranks.
void launch_gather_barrier(const GatherSumKernelArgs& args, int64_t own_bytes, cudaStream_t stream);
void launch_gather_sum(const GatherSumKernelArgs& args, int sms, cudaStream_t stream);

/// Backward of combine. For every route (t, k) with target row r:
/// grad_rows[r] = round(weight[t, k] * grad_out[t]), grad_weights[t, k] = <y[r], grad_out[t]> in
/// fp32, in an order that depends on D alone; 0 where there is no kept route.
struct GatherSumBackwardArgs {
  const RouteTarget* targets;  // [T, K]
  const float* weights;        // [T, K]
  int64_t T;
  int32_t K;
  int32_t D;
  DType dtype;                        // of grad_out, y and grad_rows: fp32, bf16 or fp16
  const std::byte* grad_out;          // [T, D]
  PeerPointers<const std::byte> y;    // [R, D] of every rank
  PeerPointers<std::byte> grad_rows;  // [R, D] of every rank
  float* grad_weights;                // [T, K]
  PeerSignals signals;
};

/// Collective; when it ends, all ranks are done. REQUIRES: all ranks' y are written and their
/// grad_rows may be written. If a rank has not arrived, no peer's memory is used; grad_weights are
/// zero, and so are the grad_rows of this rank's routes to itself. `sms`: SM limit; 0: none.
void load_gather_sum_backward();  // before the first launch
void launch_gather_sum_backward(const GatherSumBackwardArgs& args, int sms, cudaStream_t stream);

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
