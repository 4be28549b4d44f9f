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

/// One stream per rank, and the events that tie them into one graph and time it from inside,
/// without its launch: all ranks stand at a gate when the clock starts, and opening it counts; it
/// stops at the end of rank 0's work, of which a barrier is the last, so all ranks' work is done
/// (but for a plan alone, which has no such end). Shared by the threads of all ranks.
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

  /// Microseconds that the last replay of any of the graphs took.
  double last_replay_us() const;

 private:
  std::vector<cudaStream_t> streams_;
  std::unique_ptr<const StartGate> gate_;
  std::vector<cudaEvent_t> joined_;
  cudaEvent_t forked_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// Replays a graph, each time with a cold L2 cache; microseconds of each, ascending.
std::vector<double> time_replays(const RankStreams& streams, cudaGraphExec_t graph,
                                 const CacheFlush& flush, const Repeats& repeats);

}  // namespace crossdock::bench
