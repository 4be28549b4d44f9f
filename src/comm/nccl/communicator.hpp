#pragma once

#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "comm/nccl/library.hpp"
#include "core/check.hpp"
#include "core/process.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cuda {

/// An NCCL communicator with the ranks of a group: either lent by the caller and never ended here,
/// or made by the library. Thread-safe. The NcclLibrary must outlive it.
class NcclCommunicator {
 public:
  /// Lent by the caller.
  NcclCommunicator(const NcclLibrary& library, ncclComm_t comm);

  struct Member {
    int rank = 0;
    int size = 1;
    int device = 0;                       // REQUIRES: the current one
    std::chrono::nanoseconds patience{};  // how long the process waits for its end at exit
  };
  /// Made by the library: begins to connect this rank to the others, which make theirs with the
  /// same id. Does not wait. Throws Error(kUnsupported) if NCCL fails at once.
  NcclCommunicator(const NcclLibrary& library, const ncclUniqueId& id, const Member& member);

  /// If made by the library: destroys it in the background (see end_in_background), or aborts it if
  /// it was not connected or has failed. REQUIRES: its operations have completed, or it has failed.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  const NcclLibrary& library() const { return library_; }
  bool is_own() const { return is_own_; }
  int device() const { return member_.device; }

  /// Whether all ranks are connected. Throws Error(kUnsupported) if NCCL has failed to connect
  /// them.
  bool is_connected();

  /// The error of an operation that has failed, or "". Does not wait.
  std::string async_error();

  /// Calls body(ncclComm_t). Another thread's abort waits until it returns. Throws
  /// Error(kCommunication) after an abort.
  template <typename Body>
  void use(const Body& body) {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) throw Error(ErrorCode::kCommunication, kAborted);
    body(comm_);
  }

  /// REQUIRES: is_own(). Stops all operations in the background, and with them the kernels that
  /// wait for peers. Does not wait.
  void abort() noexcept;

 private:
  static constexpr const char* kAborted = "the NCCL communicator has been aborted";

  ncclResult_t state() const;       // REQUIRES: mutex_ is held, comm_ is set
  bool is_in_forked_child() const;  // where the communicator must be left alone

  const NcclLibrary& library_;
  const bool is_own_;
  const Member member_{};
  const uint64_t generation_ = fork_generation();
  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;  // null after abort
  bool is_connected_ = false;
};

struct NcclConnection {
  const NcclLibrary& library;
  int device = 0;                  // REQUIRES: the current one
  std::string config{};            // must be identical on every rank
  const Error* refusal = nullptr;  // why this rank refuses, if it does
};

/// An NCCL communicator with the group's ranks: the one that the group's dispatchers already use,
/// if there is one on every rank's device, else a new one. Part of the operation "plan", before
/// there is a plan. Collective. Throws the same error on all ranks if one refuses or cannot be
/// connected (kUnsupported), or if connecting takes longer than the arrival deadline; the group
/// stays usable.
std::shared_ptr<NcclCommunicator> share_nccl_communicator(Group& group,
                                                          const NcclConnection& connection);

}  // namespace crossdock::cuda
