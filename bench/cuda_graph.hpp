#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <vector>

#include "bench/cuda_gate.hpp"
#include "bench/cuda_memory.hpp"
#include "bench/measure.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// One stream per rank, on its GPU (gpu_of_rank), and the events that join them into one graph and
/// time it without its launch. The clock starts when all ranks wait at a gate, so it includes
/// opening the gate. It stops at the end of rank 0's work, which ends with a barrier, so all ranks
/// have finished by then (except in a plan alone, which has no barrier, and in a dispatch with one
/// copy per rank, which ends with each rank's own copies). Shared by the threads of
/// all ranks.
class RankStreams {
 public:
  explicit RankStreams(int num_ranks);
  ~RankStreams();
  RankStreams(const RankStreams&) = delete;
  RankStreams& operator=(const RankStreams&) = delete;

  cudaStream_t of(int rank) const { return streams_[static_cast<size_t>(rank)]; }
  /// One stream of each GPU, rank 0's first.
  std::vector<cudaStream_t> one_per_gpu() const;

  /// Captures the work that all ranks enqueue on their streams in `body` as one graph. Collective.
  /// Only rank 0 gets the graph, the others null; they must not destroy anything `body` created
  /// before the graph is destroyed. REQUIRES: each rank's GPU is the current one of its thread.
  cudaGraphExec_t capture(Group& group, const std::function<void()>& body);

  /// Microseconds of the latest replay of any of the graphs.
  double last_replay_us() const;

 private:
  std::vector<cudaStream_t> streams_;
  std::unique_ptr<const StartGate> gate_;
  std::vector<cudaEvent_t> joined_;
  cudaEvent_t forked_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// Replays a graph repeatedly with a cold L2 cache; returns the microseconds of each replay,
/// sorted.
std::vector<double> time_replays(const RankStreams& streams, cudaGraphExec_t graph,
                                 const CacheFlush& flush, const Repeats& repeats);

}  // namespace crossdock::bench
