#pragma once

#include "comm/nccl/library.hpp"

namespace crossdock::test {

/// Stands in for libnccl if ranks are threads of this process, on any number of GPUs. Its exchanges
/// are complete when ncclGroupEnd returns. Only one may exist at a time.
class FakeNccl {
 public:
  FakeNccl();
  /// Communicators end in the background: the next test must not count this test's communicators.
  ~FakeNccl() { await_ends(); }
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  const cuda::NcclLibrary& library() const;

  /// Faults to simulate, and on which rank; -1: none.
  struct Faults {
    bool refuses_id = false;
    bool fails_exchanges = false;  // on all ranks
    int fails_at_once = -1;        // its communicator cannot be created
    int fails_later = -1;          // its communicator fails while it is being connected
    int never_connected = -1;      // no rank's communicator becomes ready
  };
  void set_faults(const Faults& faults);

  struct Counts {
    int made = 0;
    int destroyed = 0;
    int aborted = 0;

    bool operator==(const Counts&) const = default;
  };
  /// Waits until all communicators have ended, for at most a minute.
  Counts await_ends() const;
};

}  // namespace crossdock::test
