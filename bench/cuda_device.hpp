#pragma once

namespace crossdock::bench {

/// Gives every stream a hardware queue of its own; with fewer queues, streams of several ranks
/// would share one and wait for each other. CUDA reads this setting when it starts, so it must be
/// made before any other call of CUDA in this process.
void request_a_queue_per_stream();

}  // namespace crossdock::bench
