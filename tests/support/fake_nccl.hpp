#pragma once

#include "comm/nccl/library.hpp"

namespace crossdock::test {

/// Stands in for libnccl where ranks are threads of this process, on any number of GPUs. Its
/// exchanges are complete when ncclGroupEnd returns. One at a time.
class FakeNccl {
 public:
  FakeNccl();
  /// Communicators end in the background: the next test must not count those of this one.
  ~FakeNccl() { await_ends(); }
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  const cuda::NcclLibrary& library() const;

  /// What goes wrong, and for which rank; -1: none.
  struct Faults {
    bool refuses_id = false;
    bool fails_exchanges = false;  // on all ranks
    int fails_at_once = -1;        // its communicator cannot be made
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
  /// Waits until all communicators have ended, a minute at most.
  Counts await_ends() const;
};

}  // namespace crossdock::test
