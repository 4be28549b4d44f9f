#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <vector>

#include "bench/cuda_memory.hpp"
#include "bench/measure.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// One stream per rank, and the events that tie them into one graph. Shared by the threads of all
/// ranks.
class RankStreams {
 public:
  explicit RankStreams(int num_ranks);
  ~RankStreams();
  RankStreams(const RankStreams&) = delete;
  RankStreams& operator=(const RankStreams&) = delete;

  cudaStream_t of(int rank) const { return streams_[static_cast<size_t>(rank)]; }

  /// Captures what the ranks queue into their streams in `body` as one graph. Collective: called by
  /// all ranks; the graph is rank 0's, null on the others, who must not destroy what `body` made
  /// before the graph is gone.
  cudaGraphExec_t capture(Group& group, const std::function<void()>& body);

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> joined_;
  cudaEvent_t forked_ = nullptr;
};

/// Replays a graph, each time with a cold L2 cache; microseconds of each, ascending.
std::vector<double> time_replays(cudaGraphExec_t graph, const CacheFlush& flush,
                                 const Repeats& repeats, cudaStream_t stream);

}  // namespace crossdock::bench
