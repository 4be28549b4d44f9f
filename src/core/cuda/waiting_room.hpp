#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace crossdock::cuda {

/// The multiprocessors of one device, for kernels that wait for kernels of other ranks with all
/// their blocks. They keep their room meanwhile, and those of several streams may do so at a time:
/// if they did not fit together, some could keep out the ones they wait for. Thread-safe.
class WaitingRoom {
 public:
  explicit WaitingRoom(int num_sms) : num_sms_(num_sms) {}
  WaitingRoom(const WaitingRoom&) = delete;
  WaitingRoom& operator=(const WaitingRoom&) = delete;

  /// The device's, for all ranks of this process.
  static WaitingRoom& of(int device);

  struct Request {
    uint64_t stream_id;
    int sms;          // multiprocessors
    int num_streams;  // in which the kernels of one call wait for each other on this device
  };
  /// Room for the kernels of a stream, as long as it is held; null if so much is not left. Kernels
  /// of one stream run one after the other, so they share their room. Kernels of different calls,
  /// in more streams than one call has, get three quarters of the device: their blocks differ in
  /// size, up to a quarter of a multiprocessor, and less than that may be left over everywhere.
  /// REQUIRES: the kernels have ended when it is given back, and this object lives until then.
  std::shared_ptr<const void> take(const Request& request);

 private:
  bool fits(int num_streams) const;

  int num_sms_;
  std::mutex mutex_;
  std::map<uint64_t, std::multiset<int>> of_streams_;  // what was taken
};

/// A number that no other stream of the device has. Also while the stream is captured, where the
/// driver does not tell its number. REQUIRES: not cudaStreamPerThread, which is many streams.
uint64_t id_of(cudaStream_t stream);

}  // namespace crossdock::cuda
