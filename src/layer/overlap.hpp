#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "layer/layer_parts.hpp"

namespace crossdock {

/// A thread that runs tasks in the order they were added. Thread-safe.
class Worker {
 public:
  /// Throws Error(kUnsupported) if no thread can be started.
  Worker();
  /// Waits for all tasks.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// REQUIRES: the task does not throw.
  void add(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool is_stopping_ = false;
  std::thread thread_;
};

/// Tasks that a worker runs in order while their owner continues with an exchange. Not thread-safe.
class BackgroundWork {
 public:
  /// The worker must outlive this object.
  explicit BackgroundWork(Worker& worker) : worker_(worker) {}
  /// Waits for the running task; discards tasks that have not started.
  ~BackgroundWork();
  BackgroundWork(const BackgroundWork&) = delete;
  BackgroundWork& operator=(const BackgroundWork&) = delete;

  /// Throws the exception of an earlier task if one has already failed.
  void add(std::function<void()> task);

  /// Waits for all tasks. Throws the exception of the first one that failed; no task runs after it.
  void finish();

 private:
  void run_next();
  void throw_error(std::unique_lock<std::mutex>& lock);

  Worker& worker_;
  std::mutex mutex_;
  std::condition_variable is_idle_;
  std::deque<std::function<void()>> waiting_;  // tasks that have not started
  int num_turns_ = 0;         // calls of run_next that the worker has yet to finish
  std::exception_ptr error_;  // not thrown yet
};

/// Dispatch and experts of a layer with overlap, replacing the plain sequence in moe_layer.cpp: a
/// worker thread computes while the calling thread dispatches. The worker never uses the group.
/// Results have the same bits.
///
/// - overlap_shared: the shared experts compute during the dispatch.
/// - overlap_chunks > 1: rows arrive in chunks, and the experts of a chunk compute during the
///   dispatch of the following chunks.
class Overlap {
 public:
  static bool is_requested(const MoeLayerConfig& config);

  /// `parts` must outlive this object. Throws Error(kUnsupported) if no thread can be started.
  explicit Overlap(LayerParts& parts) : parts_(parts) {}

  /// Sets `saved.sent`, `saved.experts` and `saved.shared`. Collective.
  ForwardRows forward(const MoeForwardArgs& args, MoeSaved& saved);

  /// Sets `args.saved->grad_y`. Collective.
  BackwardRows backward(const MoeBackwardArgs& args);

 private:
  LayerParts& parts_;
  Worker worker_;
};

/// The same on a GPU, without a thread: the dispatch runs in its own stream while the shared
/// experts, and the experts of chunks that have arrived, compute in the layer's stream. If the SMs
/// of the dispatch are limited, experts leave that many free until the last chunk has arrived.
/// Collective.
ForwardRows forward_beside_dispatch(LayerParts& parts, const MoeForwardArgs& args, MoeSaved& saved);
BackwardRows backward_beside_dispatch(LayerParts& parts, const MoeBackwardArgs& args);

}  // namespace crossdock
