#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

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

/// Divides the SMs of one device among kernels whose blocks all wait for kernels of other ranks.
/// They occupy their SMs while they wait, in several streams at once: if they did not fit on the
/// device together, some could keep out the kernels they wait for. Thread-safe.
class WaitingRoom {
 public:
  explicit WaitingRoom(int num_sms) : num_sms_(num_sms) {}
  WaitingRoom(const WaitingRoom&) = delete;
  WaitingRoom& operator=(const WaitingRoom&) = delete;

  /// The waiting room of a device, shared by all ranks of this process.
  static WaitingRoom& of(int device);

  struct Request {
    uint64_t stream_id;
    int sms;          // SMs that the kernels occupy
    int num_streams;  // in which the kernels of one call wait for each other on this device
  };
  /// Reserves SMs for the kernels of a stream until released; null if not enough are free. Kernels
  /// of one stream run in turn, so they share a reservation. If there are more streams than one
  /// call uses, they get only three quarters of the device: the blocks of different calls differ in
  /// size, up to a quarter of an SM, and up to that much may be left unused on each SM.
  /// REQUIRES: the kernels have ended before the release, and this object lives until then.
  std::shared_ptr<const void> take(const Request& request);

 private:
  bool fits(int num_streams) const;

  int num_sms_;
  std::mutex mutex_;
  std::map<uint64_t, std::multiset<int>> of_streams_;  // reservations
};

/// A number that is unique among the streams of the device, even while the stream is captured, when
/// the driver does not report one. REQUIRES: not cudaStreamPerThread, which is many streams.
uint64_t id_of(cudaStream_t stream);

}  // namespace crossdock::cuda
