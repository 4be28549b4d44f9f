#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

inline cudaStream_t handle_of(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

/// A stream of one device that does not wait for the default stream.
class OwnedStream {
 public:
  explicit OwnedStream(int device);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  cudaStream_t get() const { return stream_; }
  Stream view() const { return {stream_}; }
  /// Whether all its work is done. Does not wait.
  bool is_idle() const;

 private:
  cudaStream_t stream_ = nullptr;
};

/// A stream of one device that does not wait for the default stream, from among those that nobody
/// uses any more; given back with the last owner. One whose work is not done by then stays out of
/// use until it is. Streams that come and go would in time share hardware queues with others, and
/// wait for them there.
std::shared_ptr<const OwnedStream> lease_stream(int device);

/// A point in a stream, without a time.
class OwnedEvent {
 public:
  explicit OwnedEvent(int device);
  ~OwnedEvent();
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const;
  /// Later work of `stream` waits for what was recorded last.
  void make_wait(cudaStream_t stream) const;
  /// Whether that is done. Does not wait.
  bool has_passed() const;

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace crossdock::cuda
