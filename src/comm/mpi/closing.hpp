#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/mpi/communicator.hpp"

namespace crossdock::comm {

/// The two MPI communicators of an MpiCommunicator that this rank has left. They can be freed once
/// all ranks have left without a failure: no message is pending then, so MPI may reuse their
/// numbers.
struct MpiClosing {
  MPI_Comm data = MPI_COMM_NULL;
  MPI_Comm control = MPI_COMM_NULL;
  std::unique_ptr<MpiControl> links;                // over `control`
  std::vector<std::optional<ControlMessage>> left;  // [P] goodbyes received so far
  ControlMessage own_goodbye;                       // in `left` too
};

/// Keeps them until free_closed_communicators finds that all ranks have left.
void free_when_all_have_left(MpiClosing closing);

/// Frees the communicators that all ranks have left. MPI_Comm_free is collective by the standard,
/// but MPI libraries do not wait in it. Called when communicators are made, where MPI may block
/// anyway.
void free_closed_communicators();

/// Drops the rest without freeing them; called before MPI is finalised.
void give_up_closing();

/// Requests that are no longer waited for, and the memory they refer to.
struct AbandonedRequests {
  std::vector<MPI_Request> requests;
  std::vector<std::shared_ptr<const void>> memory;
};

/// Keeps them until they have completed, or until exit.
void keep_until_exit(AbandonedRequests abandoned);

}  // namespace crossdock::comm
