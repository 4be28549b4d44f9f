#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "core/cuda/stream.hpp"

namespace crossdock::cuda {

/// The stream in which a caller wants work done, as a handle that means the same stream on every
/// thread.
///
/// cudaStreamPerThread is a different stream on each thread, so it cannot be stored. A stream owned
/// by the library stands in for it: in each call it waits for the calling thread's stream, which
/// then waits for the call. Calls from different threads thus stay in order. May be used by any
/// thread, but by only one at a time.
class CallersStream {
 public:
  explicit CallersStream(int device) : device_(device), handover_(device) {}

  /// The stand-in is leased when first needed.
  void set(cudaStream_t stream);
  /// Never cudaStreamPerThread.
  cudaStream_t get() const { return is_per_thread_ ? stand_in_->get() : stream_; }
  bool is_per_thread() const { return is_per_thread_; }

  /// At the beginning of a call: get() waits for what the calling thread has queued. Does nothing
  /// for streams other than cudaStreamPerThread.
  void follow_thread() const;
  /// At the end of a call, even if it failed: the calling thread's stream waits for get().
  void lead_thread() const noexcept;

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  bool is_per_thread_ = false;
  std::shared_ptr<const OwnedStream> stand_in_;
  OwnedEvent handover_;
};

/// Makes `stream` wait for the calling thread's own stream, via `event`. Returns false if that is
/// not possible because one of the two is being captured.
bool wait_for_thread(cudaStream_t stream, const OwnedEvent& event) noexcept;

}  // namespace crossdock::cuda
