#pragma once

#if CROSSDOCK_HAS_NCCL

#include <cuda_runtime.h>
#include <nccl.h>

#include <stdexcept>

#include "comm/nccl/library.hpp"

namespace crossdock {

inline void nccl_ok(ncclResult_t status) {
  if (status == ncclSuccess) return;
  throw std::runtime_error(cuda::nccl_library().get_error_string(status));
}

/// An NCCL communicator with one rank on GPU 0.
class LoneCommunicator {
 public:
  LoneCommunicator() {
    ncclUniqueId id{};
    nccl_ok(cuda::nccl_library().get_unique_id(&id));
    cudaSetDevice(0);
    nccl_ok(cuda::nccl_library().comm_init_rank_config(&comm_, 1, id, 0, nullptr));
  }
  ~LoneCommunicator() { cuda::nccl_library().comm_destroy(comm_); }
  LoneCommunicator(const LoneCommunicator&) = delete;
  LoneCommunicator& operator=(const LoneCommunicator&) = delete;

  ncclComm_t get() const { return comm_; }

 private:
  ncclComm_t comm_ = nullptr;
};

}  // namespace crossdock

#endif
