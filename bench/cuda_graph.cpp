#include "bench/cuda_graph.hpp"

#include <algorithm>

#include "bench/cuda_device.hpp"

namespace crossdock::bench {
namespace {

// Every stream waits for all others.
void meet(Group& group) {
  group.agree({.operation = "bench"});
}

}  // namespace

RankStreams::RankStreams(int num_ranks) {
  check_cuda(cudaSetDevice(gpu_of_rank(0)), "cudaSetDevice");
  check_cuda(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming), "cudaEventCreate");
  check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
  for (int rank = 0; rank < num_ranks; ++rank) {
    const OnGpu on_gpu(gpu_of_rank(rank));
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    streams_.push_back(stream);
    joined_.push_back(event);
  }
  gate_ = std::make_unique<const StartGate>(num_ranks, streams_[0]);
}

std::vector<cudaStream_t> RankStreams::one_per_gpu() const {
  const int num_gpus = num_gpus_of(static_cast<int>(streams_.size()));
  return {streams_.begin(), streams_.begin() + num_gpus};
}

RankStreams::~RankStreams() {
  gate_.reset();  // frees its memory on a stream
  for (const cudaEvent_t event : joined_) cudaEventDestroy(event);
  for (const cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  for (const cudaEvent_t event : {forked_, begin_, end_}) cudaEventDestroy(event);
}

double RankStreams::last_replay_us() const {
  float milliseconds = 0.0f;
  check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
  return milliseconds * 1e3;
}

cudaGraphExec_t RankStreams::capture(Group& group, const std::function<void()>& body) {
  const int rank = group.rank();
  const cudaStream_t own = of(rank);
  check_cuda(cudaStreamSynchronize(own), "cudaStreamSynchronize");
  meet(group);
  if (rank == 0) {
    check_cuda(cudaStreamBeginCapture(own, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    check_cuda(cudaEventRecord(forked_, own), "cudaEventRecord");
  }
  meet(group);
  if (rank != 0) check_cuda(cudaStreamWaitEvent(own, forked_, 0), "cudaStreamWaitEvent");
  if (rank == 0) {
    gate_->queue_await_others(own);
    check_cuda(cudaEventRecordWithFlags(begin_, own, cudaEventRecordExternal), "cudaEventRecord");
    gate_->queue_open(own);
  } else {
    gate_->queue_pass(rank, own);
  }
  meet(group);
  body();
  if (rank != 0) {
    check_cuda(cudaEventRecord(joined_[static_cast<size_t>(rank)], own), "cudaEventRecord");
  }
  meet(group);
  if (rank != 0) return nullptr;
  check_cuda(cudaEventRecordWithFlags(end_, own, cudaEventRecordExternal), "cudaEventRecord");
  for (size_t r = 1; r < joined_.size(); ++r) {
    check_cuda(cudaStreamWaitEvent(own, joined_[r], 0), "cudaStreamWaitEvent");
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamEndCapture(own, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return executable;
}

std::vector<double> time_replays(const RankStreams& streams, cudaGraphExec_t graph,
                                 const CacheFlush& flush, const Repeats& repeats) {
  const cudaStream_t stream = streams.of(0);
  std::vector<double> times;
  for (int i = 0; i < repeats.warm_up + repeats.timed; ++i) {
    flush.run();
    check_cuda(cudaGraphLaunch(graph, stream), "cudaGraphLaunch");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    if (i >= repeats.warm_up) times.push_back(streams.last_replay_us());
  }
  std::sort(times.begin(), times.end());
  return times;
}

}  // namespace crossdock::bench
