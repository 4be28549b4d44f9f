#pragma once

namespace crossdock::bench {

/// Gives every stream its own hardware queue; with fewer queues, streams of several ranks would
/// share one and wait for each other. CUDA reads this setting when it starts, so call this before
/// any other CUDA call in this process.
void request_a_queue_per_stream();

/// GPUs that this many ranks use: as many as there are, at most one per rank.
int num_gpus_of(int num_ranks);
/// The GPU of a rank that is a thread: its rank modulo the number of GPUs.
int gpu_of_rank(int rank);
/// Whether each of the first `num_gpus` GPUs can use the memory of the others.
bool gpus_reach_each_other(int num_gpus);

}  // namespace crossdock::bench
