#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/cuda/peer_signals.cuh"

namespace crossdock::cuda {

/// to[to_index[i]] = from[from_index[i]] for every i, as bits; a null index means i. No row is
/// written twice. Rows of a peer that has not arrived are not read, but replaced by zeros.
struct MoveRowsArgs {
  const std::byte* from;  // [any, row_bytes]
  const int64_t* from_index;
  std::byte* to;  // [any, row_bytes]
  const int64_t* to_index;
  int64_t num_rows;
  int64_t row_bytes;
  const SignalState* signals = nullptr;  // of this rank, if `from` is a peer's
};

void load_move_rows();  // before the first launch
void launch_move_rows(const MoveRowsArgs& args, cudaStream_t stream);

}  // namespace crossdock::cuda
