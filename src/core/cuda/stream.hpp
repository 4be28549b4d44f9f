#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

inline cudaStream_t handle_of(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

/// A stream on one device. Not ordered with the device's default stream, unless waits_for_default
/// is set.
class OwnedStream {
 public:
  explicit OwnedStream(int device, bool waits_for_default = false);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  cudaStream_t get() const { return stream_; }
  Stream view() const { return {stream_}; }
  /// Whether all its work has finished. Does not wait.
  bool is_idle() const;

 private:
  cudaStream_t stream_ = nullptr;
};

/// A stream on one device, reused if possible and returned by its last owner. A returned stream
/// with unfinished work is not reused until it has finished. (Streams that are created repeatedly
/// end up sharing hardware queues with others and wait for them.)
std::shared_ptr<const OwnedStream> lease_stream(int device, bool waits_for_default = false);

/// A point in a stream, without timing.
class OwnedEvent {
 public:
  explicit OwnedEvent(int device);
  ~OwnedEvent();
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const;
  /// Makes later work of `stream` wait for the last record.
  void make_wait(cudaStream_t stream) const;
  /// Whether the work before the last record has finished. Does not wait.
  bool has_passed() const;

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace crossdock::cuda
