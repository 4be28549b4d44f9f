#pragma once

#include <cuda_runtime.h>

#include "crossdock/tensor.hpp"

namespace crossdock::bench {

/// Lets the streams of ranks go at the same moment, as ranks on GPUs of their own would: the parts
/// of a graph start one after the other. Used again and again by replays of a graph.
class StartGate {
 public:
  StartGate(int num_ranks, cudaStream_t stream);

  /// Rank 0: goes on when all others are at the gate.
  void queue_await_others(cudaStream_t stream) const;
  /// Rank 0, after it.
  void queue_open(cudaStream_t stream) const;
  /// The others: go on when it is open.
  void queue_pass(cudaStream_t stream) const;

 private:
  int num_ranks_;
  OwnedTensor words_;
};

}  // namespace crossdock::bench
