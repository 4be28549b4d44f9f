#pragma once

#include <cuda_runtime.h>

#include <memory>

namespace crossdock::bench {

/// Starts the streams of all ranks at the same moment, as if each rank had its own GPU; otherwise
/// the branches of a graph would start one after another. Can be used by any number of replays.
class StartGate {
 public:
  /// `stream` is rank 0's.
  StartGate(int num_ranks, cudaStream_t stream);

  /// Rank 0: waits until all other ranks are at the gate.
  void queue_await_others(cudaStream_t stream) const;
  /// Rank 0: opens the gate, after that.
  void queue_open(cudaStream_t stream) const;
  /// The other ranks: wait until the gate is open.
  void queue_pass(int rank, cudaStream_t stream) const;

 private:
  int num_ranks_;
  std::shared_ptr<unsigned> words_;  // [num_ranks] see the kernels
};

}  // namespace crossdock::bench
