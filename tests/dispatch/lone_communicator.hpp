#pragma once

#if CROSSDOCK_HAS_NCCL

#include <nccl.h>

#include <stdexcept>

namespace crossdock {

inline void nccl_ok(ncclResult_t status) {
  if (status != ncclSuccess) throw std::runtime_error(ncclGetErrorString(status));
}

/// An NCCL communicator with one rank on GPU 0.
class LoneCommunicator {
 public:
  LoneCommunicator() {
    const int device = 0;
    nccl_ok(ncclCommInitAll(&comm_, 1, &device));
  }
  ~LoneCommunicator() { ncclCommDestroy(comm_); }
  LoneCommunicator(const LoneCommunicator&) = delete;
  LoneCommunicator& operator=(const LoneCommunicator&) = delete;

  ncclComm_t get() const { return comm_; }

 private:
  ncclComm_t comm_ = nullptr;
};

}  // namespace crossdock

#endif
