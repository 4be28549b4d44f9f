#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

namespace crossdock::comm {

/// Requests that are no longer waited for, and the memory they refer to.
struct AbandonedRequests {
  std::vector<MPI_Request> requests;
  std::vector<std::shared_ptr<const void>> memory;
};

/// Keeps them until they have completed, or until exit.
void keep_until_exit(AbandonedRequests abandoned);

}  // namespace crossdock::comm
