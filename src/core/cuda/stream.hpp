#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

inline cudaStream_t handle_of(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

/// A stream of one device. It neither waits for the device's default stream nor makes that wait,
/// unless waits_for_default is set.
class OwnedStream {
 public:
  explicit OwnedStream(int device, bool waits_for_default = false);
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

/// A stream of one device, from among those that nobody uses any more; given back with the last
/// owner. One whose work is not done by then stays out of use until it is. Streams that come and go
/// would in time share hardware queues with others, and wait for them there.
std::shared_ptr<const OwnedStream> lease_stream(int device, bool waits_for_default = false);

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
