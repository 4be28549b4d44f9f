#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace crossdock::cuda {

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
