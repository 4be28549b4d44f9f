#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "core/cuda/stream.hpp"

namespace crossdock::cuda {

/// The stream in which a caller wants work done, by a handle that means the same on every thread.
///
/// cudaStreamPerThread is another stream on every thread, so it cannot be stored. A stream of the
/// library's own stands in for it: in each call it waits for what the calling thread's stream
/// holds, and that one then waits for the call. So calls stay in order where they come from
/// different threads. Used by one thread at a time, by any thread.
class CallersStream {
 public:
  explicit CallersStream(int device) : device_(device), handover_(device) {}

  /// The stand-in is taken when first needed.
  void set(cudaStream_t stream);
  /// Never cudaStreamPerThread.
  cudaStream_t get() const { return is_per_thread_ ? stand_in_->get() : stream_; }
  bool is_per_thread() const { return is_per_thread_; }

  /// At the begin of a call: get() waits for what the calling thread has queued. Nothing to do for
  /// other streams than cudaStreamPerThread.
  void follow_thread() const;
  /// At its end, also of one that failed: the calling thread's stream waits for get().
  void lead_thread() const noexcept;

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  bool is_per_thread_ = false;
  std::shared_ptr<const OwnedStream> stand_in_;
  OwnedEvent handover_;
};

/// Makes `stream` wait for what the calling thread's own stream holds, by way of `event`. False if
/// there is no order to be had: one of the two is being captured.
bool wait_for_thread(cudaStream_t stream, const OwnedEvent& event) noexcept;

}  // namespace crossdock::cuda
