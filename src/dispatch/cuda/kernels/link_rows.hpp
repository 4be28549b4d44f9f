#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "crossdock/dtype.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// Tells the owner of every row which rows belong to the same token, and each source which ranks
/// its tokens go to.
struct LinkRowsArgs {
  const RouteTarget* targets;  // [T, K]
  const float* weights;        // [T, K]
  int64_t T;
  int32_t K;
  PlanLinks links;             // of this rank; links.rank_targets is written
  PeerPointers<RowLink> rows;  // PlanLinks::rows of every rank; null if it has no target
  PeerSignals signals;
};

/// Collective; when it ends, all ranks are done. Writes the links of all rows that are targets.
/// REQUIRES: all ranks' links are free to be written. If a rank has not arrived, this rank's links
/// are all zero.
void load_link_rows();  // before the first launch
void launch_link_rows(const LinkRowsArgs& args, cudaStream_t stream);

/// One part of every row, moved as bits.
struct FanOutPart {
  std::byte* rows;  // [R, row_bytes]
  int64_t row_bytes;
};

/// After a scatter to PlanLinks::rank_targets, locally on each rank: copies the row of a token's
/// lowest slot to the token's other rows here, and sets the weight of every row.
struct FanOutArgs {
  PlanLinks links;
  const int64_t* rows_in_use;  // [1]
  int32_t num_parts;           // fp8: 2, values and scales; else 1
  FanOutPart parts[2];
  float* row_weights;          // [R], or null: not requested
  const SignalState* signals;  // of this rank; if a rank has not arrived, all rows become zero
};

/// `sms`: SM limit; 0: none.
void load_fan_out();  // before the first launch
void launch_fan_out(const FanOutArgs& args, int sms, cudaStream_t stream);

/// Sums the rows of each token on this rank, locally: partials[first row] = round(acc), acc from +0
/// by fma(weight, row, acc) in fp32 in slot order. Other rows of partials are not written. If a
/// rank has not arrived, none are.
struct PartialSumsArgs {
  PlanLinks links;
  const int64_t* rows_in_use;  // [1]
  bool is_weighted;            // by the links' weights; false: all are 1
  int32_t D;
  DType dtype;                 // of rows: fp32, bf16 or fp16
  DType partial_dtype;         // fp32 or dtype
  const std::byte* rows;       // [R, D]
  std::byte* partials;         // [R, D]
  const SignalState* signals;  // of this rank
};

/// `sms`: SM limit; 0: none.
void load_partial_sums();  // before the first launch
void launch_partial_sums(const PartialSumsArgs& args, int sms, cudaStream_t stream);

}  // namespace crossdock::cuda
