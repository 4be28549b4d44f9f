#pragma once

#include <functional>

namespace crossdock::comm {

/// Calls `notice` if the process exits while this object exists, before MPI is finalised by
/// ensure_mpi_is_initialized. Other threads may still be running then. The exit of a forked child
/// does not call it.
class ExitNotice {
 public:
  explicit ExitNotice(std::function<void()> notice);
  ~ExitNotice();
  ExitNotice(const ExitNotice&) = delete;
  ExitNotice& operator=(const ExitNotice&) = delete;

 private:
  std::function<void()> notice_;
};

}  // namespace crossdock::comm
